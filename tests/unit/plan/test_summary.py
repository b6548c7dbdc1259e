import json
from dataclasses import replace

import pytest

from vllm_kvpp.plan import LayerCache, place, plan_cache
from vllm_kvpp.plan.summary import CacheSummary

MIB = 1024 * 1024
PAGE = 1152 * 16


def summarise(*, group_rank=0, num_layers=6, group_size=2, num_blocks=11_633, draft_layers=()):
    caches = [LayerCache(f"layers.{number}.attn", PAGE) for number in (*range(num_layers), *draft_layers)]
    draft_names = {f"layers.{number}.attn" for number in draft_layers}
    plan = plan_cache(caches, group_size=group_size, draft_names=draft_names)
    return CacheSummary(
        plan=plan,
        placement=place(plan, group_rank, num_blocks),
        group_rank=group_rank,
        block_size=16,
        available_bytes=1024 * MIB,
    )


def line_of(summary, title):
    (line,) = (line for line in summary.as_lines() if line.startswith(f"  {title}  "))
    return line


def test_tokens_are_blocks_times_block_size():
    assert summarise().num_tokens == 186_128


def test_tokens_without_kvpp_are_whole_blocks_of_every_layer():
    assert summarise().num_tokens_without == 155_344


def test_the_first_line_says_which_rank_speaks():
    assert summarise(group_rank=1).as_lines()[0] == "KVPP group rank 1 of 2"


def test_the_log_shows_the_owned_layers_as_a_span():
    assert line_of(summarise(group_rank=1), "owned layers") == "  owned layers     3–5 (3 of 6)"


def test_the_log_shows_a_single_owned_layer_by_its_number():
    assert line_of(summarise(num_layers=2), "owned layers") == "  owned layers     0 (1 of 2)"


def test_the_log_says_when_a_rank_owns_no_layer():
    summary = summarise(num_layers=2, group_size=8, group_rank=7)

    assert line_of(summary, "owned layers") == "  owned layers     none (0 of 2)"


def test_the_log_splits_the_bytes_per_block_by_kind():
    summary = summarise(draft_layers=(6,))

    assert line_of(summary, "bytes per block") == (
        "  bytes per block  110,592 = 55,296 owned + 18,432 draft + 36,864 scratch (without KVPP 129,024)"
    )


def test_the_log_shows_the_blocks_and_their_size():
    assert line_of(summarise(), "blocks") == "  blocks           11,633 of 16 tokens"


def test_the_log_shows_the_tokens_beside_those_without_kvpp():
    assert line_of(summarise(), "tokens") == ("  tokens           186,128 (without KVPP 155,344; factor 1.20)")


def test_the_log_shows_an_infinite_factor_where_stock_vllm_holds_nothing():
    caches = [LayerCache(f"layers.{number}.attn", PAGE) for number in range(6)]
    plan = plan_cache(caches, group_size=2)
    summary = CacheSummary(plan, place(plan, 0, 1), group_rank=0, block_size=16, available_bytes=PAGE)

    assert "factor inf" in line_of(summary, "tokens")


def test_the_log_shows_how_much_of_the_memory_is_used():
    summary = summarise(num_blocks=5_000)
    unused = summary.available_bytes - summary.placement.num_bytes

    assert line_of(summary, "memory") == (f"  memory           0.429 of 1.000 GiB available, {unused:,} bytes unused")


def test_the_report_holds_the_numbers_of_the_plan():
    summary = summarise(draft_layers=(6,), num_blocks=9_000)

    assert summary.as_dict() == {
        "group_size": 2,
        "group_rank": 0,
        "num_target_layers": 6,
        "owned_layers": [0, 1, 2],
        "bytes_per_block": {
            "owned": 55_296,
            "draft": 18_432,
            "scratch": 36_864,
            "total": 110_592,
            "without_kvpp": 129_024,
        },
        "num_blocks": 9_000,
        "block_size": 16,
        "num_tokens": 144_000,
        "num_tokens_without_kvpp": 133_152,
        "available_bytes": 1024 * MIB,
        "planned_bytes": summary.placement.num_bytes,
        "staging_bytes": 0,
        "transfer": "auto",
        "transport": "broadcast",
        "decode": "transfer",
        "exchange_bytes": 0,
    }


def test_the_log_shows_what_moves_and_how():
    assert line_of(summarise(), "transfer") == "  transfer         auto, by broadcast, without staging memory"


def test_the_log_shows_the_staging_memory():
    plan = plan_cache([LayerCache("layers.0.attn", PAGE)], group_size=2)
    summary = CacheSummary(
        plan,
        place(plan, 0, 1, 65_536),
        group_rank=0,
        block_size=16,
        available_bytes=MIB,
        transfer="active",
        staging_bytes=65_536,
    )

    assert line_of(summary, "transfer").endswith("active, by broadcast, through 65,536 bytes of staging memory")


@pytest.mark.parametrize(
    ("decode", "exchange_bytes", "words"),
    [
        ("transfer", 0, "moves history"),
        ("in_place", 0, "in place: every rank reads the owners' memory"),
        ("owner", 4096, "at the owner; queries and outputs through 4,096 bytes"),
        ("auto", 512, "at the owner, or moves history, what costs less; queries and outputs through 512 bytes"),
    ],
)
def test_the_log_shows_where_decode_tokens_attend(decode, exchange_bytes, words):
    summary = replace(summarise(), decode=decode, exchange_bytes=exchange_bytes)

    assert line_of(summary, "decode") == f"  decode           {words}"
    assert (summary.as_dict()["decode"], summary.as_dict()["exchange_bytes"]) == (decode, exchange_bytes)


def test_the_report_is_plain_values():
    report = summarise().as_dict()

    assert json.loads(json.dumps(report)) == report


def test_a_plan_without_caches_has_no_tokens():
    plan = plan_cache([], group_size=2)
    summary = CacheSummary(plan, place(plan, 0, 0), group_rank=0, block_size=16, available_bytes=1024)

    assert (summary.num_tokens, summary.num_tokens_without) == (0, 0)
