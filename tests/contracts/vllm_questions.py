"""What the contract tests ask of a vLLM release; runs in a process of its own, one question a line."""

# Imported where asked: a module that a release has moved breaks its own question only.
# ruff: noqa: PLC0415

import ast
import inspect
import json
import os
import sys
import traceback
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
SEAM_FILES = sorted((ROOT / "src/vllm_kvpp/vllm_seam").glob("*.py"))


def describe_release() -> dict[str, str | None]:
    """Which vLLM this process has imported."""
    import vllm

    from vllm_kvpp.vllm_seam.symbols import installed_version

    return {"file": vllm.__file__, "version": installed_version()}


def find_seam_faults() -> list[str]:
    """One line for each broken symbol of the seam: what is wrong, why it matters, where it is used."""
    from vllm_kvpp.vllm_seam.doctor_symbols import DOCTOR_SYMBOLS
    from vllm_kvpp.vllm_seam.symbols import SEAM

    return [
        f"{fault} | needed because: {symbol.because} | used in: {_name_users(symbol.path)}"
        for symbol in (*SEAM, *DOCTOR_SYMBOLS)
        if (fault := symbol.find_fault()) is not None
    ]


def _name_users(path: str) -> str:
    leaf = path.replace(":", ".").rpartition(".")[2]
    users = [file.name for file in SEAM_FILES if file.name != "symbols.py" and leaf in file.read_text()]
    return ", ".join(users) or "symbols.py only"


def find_fault(path: str, checks: dict[str, Any]) -> str | None:
    """What `SeamSymbol.find_fault` says."""
    from vllm_kvpp.vllm_seam.symbols import SeamSymbol

    lists = {name: tuple(values) for name, values in checks.items()}
    return SeamSymbol(path, because="", removable_when="", **lists).find_fault()


def check_symbol(path: str) -> str | None:
    """The message with which KVPP would refuse to start if the seam held only this symbol, or None."""
    from vllm_kvpp.errors import KVPPSeamError
    from vllm_kvpp.vllm_seam.symbols import SeamSymbol, check_seam

    try:
        check_seam((SeamSymbol(path, because="", removable_when=""),))
    except KVPPSeamError as error:
        return str(error)
    return None


def list_splitting_ops(settings: dict[str, Any]) -> list[str]:
    """Where a compiled model is cut for PIECEWISE graphs, with these settings of the compilation configuration."""
    from vllm.config import CompilationConfig

    config = CompilationConfig(mode=3, cudagraph_mode="PIECEWISE", **settings)
    config.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    return list(config.splitting_ops)


def record_cache_update() -> list[str]:
    """What the custom op of the cache update calls on a layer whose hook was set on the instance, as KVPP's is."""
    import torch
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.attention.mla_attention import unified_mla_kv_cache_update

    calls: list[str] = []
    layer = SimpleNamespace(kv_cache=torch.zeros(1))
    layer.update_kv_cache = lambda *_args: calls.append("update_kv_cache")
    context = SimpleNamespace(
        attn_metadata={"layer": None}, no_compile_layers={"layer": layer}, slot_mapping={"layer": torch.zeros(1)}
    )
    with override_forward_context(context):
        # Set last: an op that had looked the method up earlier would miss it.
        layer.prepare_kv_cache_update = lambda _metadata: calls.append("prepare_kv_cache_update")
        unified_mla_kv_cache_update(torch.zeros(1, 1), torch.zeros(1, 1), "layer", "auto", torch.ones(1))
    return calls


def schedule_asynchronously() -> list[dict[str, Any]]:
    """See `async_steps`."""
    import async_steps

    return async_steps.schedule_asynchronously()


def record_executor_message() -> dict[str, Any]:
    """What the multi-process executor sends for one step: how many messages, and whether it is the output itself."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    sent: list[Any] = []
    executor = SimpleNamespace(
        output_rank=0,
        kv_output_aggregator=None,
        ec_output_aggregator=None,
        is_failed=False,
        rpc_broadcast_mq=SimpleNamespace(enqueue=sent.append),
        response_mqs=[None, None],
        futures_queue=deque(),
        shutdown_event=None,
    )
    executor.collective_rpc = lambda *args, **kwargs: MultiprocExecutor.collective_rpc(executor, *args, **kwargs)
    scheduler_output = object()
    MultiprocExecutor.execute_model(executor, scheduler_output, non_block=True)
    method, args, _kwargs, _output_rank = sent[0]
    return {"messages": len(sent), "method": method, "is_the_output": len(args) == 1 and args[0] is scheduler_output}


def read_source(path: str) -> str:
    """The source of `module:attribute.path`."""
    from vllm_kvpp.vllm_seam.symbols import resolve

    return inspect.getsource(resolve(path))


def read_class(file: str, name: str) -> dict[str, list[str]]:
    """Bases and methods of a class in a file of vLLM that cannot be imported without its own dependencies."""
    import vllm

    tree = ast.parse((Path(vllm.__file__).parent / file).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {"bases": [ast.unparse(base) for base in found.bases], "methods": methods}


def get_environment_default(name: str) -> Any:
    """The value of a setting of `vllm.envs`, None if there is none of that name."""
    import vllm.envs

    return getattr(vllm.envs, name) if name in vllm.envs.environment_variables else None


class _Settings:
    """Settings of a configuration that is asked only for what a test sets; everything else is off."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        # The names of methods, which the question calls to find out that nothing is needed.
        return (lambda: False) if name.startswith("_") else None


def find_unsupported_by_runner_v1(parallel: dict[str, Any], speculative: dict[str, Any] | None) -> list[str]:
    """What vLLM itself says that model runner V1 cannot do of a configuration."""
    from vllm.config import VllmConfig

    config = _Settings(
        parallel_config=_Settings(**{"prefill_context_parallel_size": 1, "pipeline_parallel_size": 1} | parallel),
        scheduler_config=_Settings(),
        speculative_config=None if speculative is None else _Settings(**speculative),
    )
    found: list[str] = VllmConfig._get_v1_model_runner_unsupported_features(config)
    return found


def gather_for_cache(num_ranks: int, num_tokens: int) -> dict[str, Any]:
    """What one PCP rank writes to its cache when each rank has computed its share of the tokens."""
    import torch
    from vllm.v1.attention.ops import pcp

    # Every rank's tokens are numbered on from the one before.
    pcp.get_pcp_group = lambda: SimpleNamespace(
        world_size=num_ranks,
        all_gather=lambda own, dim: torch.cat([own + rank * num_tokens for rank in range(num_ranks)], dim=dim),
    )
    own = torch.arange(num_tokens).reshape(-1, 1)
    slots = torch.arange(num_ranks * num_tokens)
    latent, _, slots = pcp.maybe_gather_mla_latent_cache_inputs(
        own, own.reshape(-1, 1, 1), slots, num_decode_tokens=0, use_pcp=True, pcp_shard_decode_requests=True
    )
    return {"tokens": latent.flatten().tolist(), "slots": slots.tolist()}


def list_groups(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """The ranks of the groups that vLLM makes for these sizes: by name, each a list of groups."""
    import torch
    import vllm.config
    from vllm.distributed import parallel_state

    parallel = vllm.config.ParallelConfig(**sizes, distributed_executor_backend="mp")
    config = _Settings(parallel_config=parallel)
    made: dict[str, list[list[int]]] = {}

    def record(group_ranks: list[list[int]], *_args: Any, group_name: str | None = None, **_kwargs: Any) -> Any:
        made[str(group_name)] = [list(ranks) for ranks in group_ranks]
        return _Settings(world_size=len(group_ranks[0]), rank_in_group=0)

    with (
        # The module keeps its groups in globals, and refuses to make them twice.
        patch.dict(vars(parallel_state)),
        patch.object(vllm.config, "get_current_vllm_config", lambda: config),
        patch.object(parallel_state, "init_model_parallel_group", record),
        patch.object(parallel_state, "get_world_group", lambda: _Settings(rank_in_group=0, local_rank=0)),
        patch.object(torch.distributed, "is_initialized", lambda: True),
        patch.object(torch.distributed, "get_world_size", lambda *_: parallel.world_size_across_dp),
        patch.object(torch.distributed, "get_rank", lambda *_: 0),
        patch.object(torch.distributed, "get_backend", lambda *_: "gloo"),
    ):
        parallel_state.initialize_model_parallel(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
        )
    return made


def main() -> None:
    """Answer until the questions end."""
    # vLLM logs to stdout, which carries the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Ahead of the first question, while the process of another release does the same.
    find_seam_faults()
    for line in sys.stdin:
        question, arguments = json.loads(line)
        try:
            answer, error = globals()[question](**arguments), None
        except Exception:
            answer, error = None, traceback.format_exc()
        print(json.dumps([answer, error]), file=answers, flush=True)


if __name__ == "__main__":
    main()
