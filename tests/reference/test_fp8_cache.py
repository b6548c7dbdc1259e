import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_moe_checkpoint
from engine_process import EngineRun, run_engine
from fp8_probe import round_to_fp8
from mla_cpu_reference import fp8_cache
from recall_runs import rpc
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

needs_engine = [pytest.mark.engine, pytest.mark.slow]

RANK, ROPE, NOPE, V, HEADS, BLOCK = 512, 64, 16, 16, 2, 16
SOFTMAX_SCALE = (NOPE + ROPE) ** -0.5
NUM_BLOCKS = 7
# Out of order, and one block of each request beyond its end.
BLOCK_TABLE = torch.tensor([[5, 2, 0], [3, 6, 1]], dtype=torch.int32)
LENGTHS = [20, 31]
SCALES = [1.0, 0.25, 0.013]
_generator = random.Random(3)
PROMPTS = [[_generator.randrange(2, 512) for _ in range(length)] for length in (20, 33, 90)]


@pytest.fixture(autouse=True)
def _applied(monkeypatch: pytest.MonkeyPatch) -> None:
    # Noted for monkeypatch, which then undoes what the part changes.
    monkeypatch.setattr(CPUMLABackend, "supported_kv_cache_dtypes", CPUMLABackend.supported_kv_cache_dtypes)
    for name in ("__init__", "do_kv_cache_update", "forward_mqa", "_compute_prefill_context"):
        monkeypatch.setattr(CPUMLAImpl, name, getattr(CPUMLAImpl, name))
    fp8_cache.apply()


def _make_impl(kv_cache_dtype: str = "fp8") -> Any:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(HEADS * (NOPE + V), RANK, generator=generator) / RANK**0.5
    kv_b_proj = torch.nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
    kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)

    class Projection:
        weight = kv_b_proj.weight

        def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
            return kv_b_proj(latent), None

    return CPUMLAImpl(
        num_heads=HEADS,
        head_size=RANK + ROPE,
        scale=SOFTMAX_SCALE,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=V,
        kv_b_proj=Projection(),
    )


@dataclass
class _Written:
    """A cache with the keys of two requests, and what each request's keys become by rounding, `[tokens, 576]`."""

    impl: Any
    cache: torch.Tensor
    scale: torch.Tensor
    keys: list[torch.Tensor]

    def rounded(self, request: int) -> torch.Tensor:
        return round_to_fp8(self.keys[request] / self.scale) * self.scale


def _write(scale: float, gain: float = 1.0, kv_cache_dtype: str = "fp8") -> _Written:
    generator = torch.Generator().manual_seed(0)
    impl, k_scale = _make_impl(kv_cache_dtype), torch.tensor(scale)
    # What other requests left behind: not a number, should anyone read it.
    cache = torch.full((NUM_BLOCKS, BLOCK, RANK + ROPE), 0x7F, dtype=torch.uint8)
    keys = []
    for request, length in enumerate(LENGTHS):
        key = torch.randn(length, RANK + ROPE, generator=generator) * gain
        slots = torch.tensor(
            [int(BLOCK_TABLE[request, position // BLOCK]) * BLOCK + position % BLOCK for position in range(length)]
        )
        impl.do_kv_cache_update(key[:, :RANK], key[:, None, RANK:], cache, slots, kv_cache_dtype, k_scale)
        keys.append(key)
    return _Written(impl, cache, k_scale, keys)


def _restore(written: _Written, request: int) -> torch.Tensor:
    blocks, table = fp8_cache.restore_blocks(written.cache, BLOCK_TABLE, written.scale, torch.float32)
    return torch.cat([blocks[block] for block in table[request]])[: LENGTHS[request]]


@pytest.mark.parametrize("scale", SCALES)
def test_what_is_read_back_is_what_was_written_rounded_to_fp8(scale: float) -> None:
    written = _write(scale)
    for request in (0, 1):
        torch.testing.assert_close(_restore(written, request), written.rounded(request), rtol=1e-6, atol=1e-9)


def test_values_beyond_fp8_become_its_largest_and_not_nan() -> None:
    written = _write(0.001)
    restored = _restore(written, 0)
    assert restored.abs().max() == pytest.approx(0.448)
    assert not restored.isnan().any()


def test_padding_is_not_written() -> None:
    written = _write(1.0)
    before = written.cache.clone()
    key = torch.zeros(2, RANK + ROPE)
    nowhere = torch.tensor([-1, -1])
    written.impl.do_kv_cache_update(key[:, :RANK], key[:, None, RANK:], written.cache, nowhere, "fp8", written.scale)
    assert torch.equal(written.cache, before)


@pytest.mark.parametrize("is_tuple", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_decode_attends_to_the_rounded_keys(scale: float, is_tuple: bool) -> None:
    written = _write(scale)
    query = torch.randn(2, HEADS, RANK + ROPE, generator=torch.Generator().manual_seed(2))
    metadata = _metadata(
        decode=MLACommonDecodeMetadata(block_table=BLOCK_TABLE, seq_lens=torch.tensor(LENGTHS), dcp_tot_seq_lens=None)
    )
    output, _ = written.impl.forward_mqa(
        (query[..., :RANK], query[..., RANK:]) if is_tuple else query,
        written.cache.view(torch.float8_e4m3fn),
        metadata,
        SimpleNamespace(_k_scale=written.scale),
    )
    for request in (0, 1):
        keys = written.rounded(request)
        weights = (query[request] @ keys.T * SOFTMAX_SCALE).softmax(dim=-1)
        torch.testing.assert_close(output[request], weights @ keys[:, :RANK], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_a_later_chunk_attends_to_the_rounded_keys_of_the_earlier_ones(scale: float) -> None:
    written, num_new = _write(scale), 3
    query = torch.randn(2 * num_new, HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(2))
    output, _ = written.impl._compute_prefill_context(
        query, written.cache.view(torch.float8_e4m3fn), _metadata(prefill=_context_of_both(num_new)), written.scale
    )
    for request in (0, 1):
        rows = slice(request * num_new, (request + 1) * num_new)
        keys = written.rounded(request)
        projected = written.impl.kv_b_proj(keys[:, :RANK])[0].view(-1, HEADS, NOPE + V)
        key = torch.cat([projected[..., :NOPE], keys[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
        weights = (torch.einsum("qhd,khd->hqk", query[rows], key) * SOFTMAX_SCALE).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, projected[..., NOPE:])
        torch.testing.assert_close(output[rows], expected, rtol=1e-4, atol=1e-5)
    assert written.impl.kv_cache_dtype == "fp8"


def _metadata(**parts: Any) -> Any:
    """The metadata of two requests, as far as these paths read them."""
    nothing = torch.empty(0)
    return MLACommonMetadata(
        num_reqs=2,
        max_query_len=1,
        max_seq_len=max(LENGTHS),
        num_actual_tokens=2,
        query_start_loc=nothing,
        slot_mapping=nothing,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=0,
        **parts,
    )


def _context_of_both(num_new: int) -> MLACommonPrefillMetadata:
    """One chunk that holds the whole context of both requests, each with `num_new` new tokens."""
    starts, ends = torch.tensor([0, num_new, 2 * num_new]), torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    chunk = MLACommonPrefillMetadata.ContextChunk(
        index=0,
        request_slice=slice(0, 2),
        token_slice=slice(0, 2 * num_new),
        continuation_token_end=0,
        is_continuation=False,
        num_context_tokens=sum(LENGTHS),
        query_start_loc=starts,
        max_query_len=num_new,
        cu_seq_lens=ends,
        starts=torch.tensor([0, 0]),
        max_seq_len=max(LENGTHS),
        seq_lens=torch.tensor(LENGTHS),
        token_to_seq=torch.empty(0),
        all_rows_active=True,
    )
    backend = CPUSDPAMLAPrefillBackend.__new__(CPUSDPAMLAPrefillBackend)
    backend.scale = SOFTMAX_SCALE
    return MLACommonPrefillMetadata(
        block_table=BLOCK_TABLE,
        query_start_loc=starts,
        max_query_len=num_new,
        chunked_context=MLACommonPrefillMetadata.ChunkedContextMetadata(
            context_lens=torch.tensor(LENGTHS),
            workspace=torch.empty(64, RANK + ROPE),
            chunks=[chunk],
            context_lens_list=LENGTHS,
            empty_token_slices=[],
        ),
        q_data_type=torch.float32,
        prefill_backend=backend,
    )


def test_a_plain_cache_is_written_as_it_was() -> None:
    impl, cache = _make_impl("auto"), torch.zeros(1, BLOCK, RANK + ROPE)
    key = torch.randn(1, RANK + ROPE)
    impl.do_kv_cache_update(key[:, :RANK], key[:, None, RANK:], cache, torch.tensor([3]), "auto", torch.tensor(2.0))
    assert torch.equal(cache[0, 3], key[0])


def test_a_scale_for_each_head_is_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match="one scale for all keys of a layer; found 4"):
        fp8_cache.quantize(torch.zeros(1, 8), torch.ones(4))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e5m2", "fp8_ds_mla", "int8_per_token_head"])
def test_other_quantised_forms_are_refused_by_name(kv_cache_dtype: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_dtype is {kv_cache_dtype}; .* auto, fp8 or fp8_e4m3"):
        _make_impl(kv_cache_dtype)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """The same prompts with an fp8 cache, and with a plain one that keeps rounded values; with two scales each."""
    # Not the recall model: its keys are so alike that rounding to fp8 leaves nothing to recall.
    model = write_moe_checkpoint(tmp_path_factory.mktemp("model"), num_layers=3, num_experts=4)
    workload = {"kind": "generate", "prompts": PROMPTS, "lengths": [8, 10, 12]}

    def run(kv_cache_dtype: str, method: str) -> EngineRun:
        engine = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_memory_bytes": 32 * 1024 * 1024,
            "tensor_parallel_size": 2,
            "kv_cache_dtype": kv_cache_dtype,
            "worker_extension_cls": "fp8_probe.Fp8Probe",
            # Less than the longest prompt, so that it comes in chunks.
            "max_num_batched_tokens": 64,
            # A block of the first scale must not be found again with the second.
            "enable_prefix_caching": False,
        }
        actions = [rpc(method, 1.0), workload, rpc(method, 0.05), workload]
        folder = tmp_path_factory.mktemp(kv_cache_dtype)
        return run_engine(engine, actions, folder, reference=["fp8_cache", "chunked_prefill"])

    return {"fp8": run("fp8", "set_key_scale"), "plain": run("auto", "round_writes")}


class TestTwoRanksWithAnFp8Cache:
    pytestmark = needs_engine

    @pytest.mark.parametrize("action", [1, 3])
    def test_they_answer_as_with_a_plain_cache_of_rounded_values(self, runs: dict[str, EngineRun], action: int) -> None:
        assert runs["fp8"].answers(action) == runs["plain"].answers(action)

    def test_the_scale_matters(self, runs: dict[str, EngineRun]) -> None:
        assert runs["fp8"].answers(1) != runs["fp8"].answers(3)

    def test_a_quarter_of_the_bytes_holds_four_times_the_tokens(self, runs: dict[str, EngineRun]) -> None:
        assert runs["fp8"].num_tokens // runs["plain"].num_tokens == 4
