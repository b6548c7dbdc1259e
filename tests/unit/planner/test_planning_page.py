"""docs/planning.md shows what the command prints."""

import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs/planning.md").read_text()
EXAMPLES = re.findall(r"```bash\nvllm-kvpp plan ([^\n]*)\n```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_its_examples():
    assert len(EXAMPLES) == 3
    # Those of the charts and of a hub show no output, and that of CPUs a part of it.
    assert PAGE.count("\nvllm-kvpp plan ") == 6


@pytest.mark.parametrize(("arguments", "shown"), EXAMPLES, ids=[arguments.split()[0] for arguments, _ in EXAMPLES])
def test_an_example_shows_what_is_printed(arguments, shown, run):
    printed = run(*shlex.split(arguments)).output

    assert [line.rstrip() for line in printed.rstrip().splitlines()] == shown.rstrip().splitlines()


def test_the_example_of_cpus_shows_a_part_of_what_is_printed(run):
    ((arguments, shown),) = re.findall(
        r"```bash\nvllm-kvpp plan ([^\n]*)\n```\n\nThe part on traffic:\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL
    )
    printed = "\n".join(line.rstrip() for line in run(*shlex.split(arguments)).output.splitlines())

    assert f"\n{shown}" in printed


@pytest.mark.parametrize(
    ("claim", "options", "expected"),
    [
        ("11,173 blocks", {}, lambda found: found.capacity.num_blocks_without == 11_173),
        ("737,280 bytes, so 68,066 blocks", {}, lambda found: found.capacity.num_blocks == 68_066),
        ("The factor is 6.09", {}, lambda found: round(found.capacity.factor, 2) == 6.09),
        ("since 64 MiB of each rank", {}, lambda found: found.capacity.stages[0].tail_bytes == 64 * 1024**2),
        ("12.8 ms of transfers", {}, lambda found: round(found.steps[1].transfer_seconds * 1e3, 1) == 12.8),
        ("44 ms of it stand\n  still", {}, lambda found: round(found.steps[0].exposure.exposed * 1e3) == 44),
        ("holds 1.31 times", {}, lambda found: round(found.fit_with_dcp.num_tokens / found.fit.num_tokens, 2) == 1.31),
    ],
)
def test_what_is_said_about_the_first_example_holds(claim, options, expected, plan):
    found = plan("kimi-k2.5", gpu="h200", kv_memory="46.8GiB", context=65_536, num_requests=4, **options)

    assert claim in PAGE
    assert expected(found)


def test_what_is_said_about_the_second_example_holds(plan):
    options = {"gpu": "h200", "kv_cache_dtype": "fp8", "context": 131_072}
    found = plan("glm-5.2-fp8", draft="mtp", **options)
    (stage,) = found.capacity.stages

    assert "54,728 bytes a token in all" in PAGE
    assert stage.plan.full_bytes_per_block == 54_728 * 64
    assert "21 of the 78 layers" in PAGE
    assert (len(found.model.indexer.layers), found.model.num_layers) == (21, 78)
    assert "rank 0 has four of them" in PAGE
    assert sum(number in found.model.indexer.layers for number in stage.ranks[0].owned_layers) == 4
    assert stage.num_blocks == stage.ranks[0].num_blocks
    assert "without `--draft mtp` the factor would be higher" in PAGE
    assert plan("glm-5.2-fp8", **options).capacity.factor > found.capacity.factor


@pytest.mark.parametrize(
    ("num_bytes", "options"),
    [
        (1_836 * 128 * 92_628, {}),
        (4_339 * 128 * 47_400, {"pp_size": 2, "pp_partition": "38,40"}),
    ],
)
def test_the_table_of_published_figures_has_what_is_planned_for_glm(num_bytes, options, plan):
    capacity = plan("glm-5.2", kv_memory=f"{num_bytes}B", block_size=128, **options).capacity

    assert f"{capacity.num_tokens_without:,} without" in PAGE
    assert f"| {capacity.num_tokens:,} ({capacity.factor:.2f}×) |" in PAGE


def test_the_table_of_published_figures_has_what_is_planned_for_others(plan):
    kimi = plan("kimi-k2-instruct", kv_memory="46.80GiB")
    lite = plan("deepseek-v2-lite", tp_size=2, kv_memory="1GiB").capacity.stages[0].plan.full_bytes_per_block

    assert f"| {kimi.fit_without.num_tokens:,} | {kimi.fit_without.num_tokens:,} |" in PAGE
    assert f"| {kimi.fit_with_dcp.num_tokens:,} |" in PAGE
    assert f"| {32_768 // 64 * lite / 1024**3:.3f} GiB |" in PAGE
