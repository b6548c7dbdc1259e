"""Methods that tests call in the workers, through `--worker-extension-cls` and `collective_rpc`."""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from vllm_kvpp.selection import TransferSeconds


class _NothingMoved:
    num_bytes = 0
    num_calls = 0

    def wait(self) -> None:
        pass

    def seconds(self) -> TransferSeconds:
        return TransferSeconds(0.0, 0.0)


class _MovesNothing:
    """A transport that claims to have moved each bundle, except of the layers in `moved`, which it really moves."""

    def __init__(self, real: Any, moved: set[int], num_layers: int) -> None:
        self.real = real
        self.traits = real.traits
        self._moved = moved
        self._num_layers = num_layers
        self._num_started = 0

    def prepare(self, selection: Any) -> None:
        self.real.prepare(selection)

    def start(self, memory: Any) -> Any:
        index, self._num_started = self._num_started, self._num_started + 1
        if index % self._num_layers in self._moved:
            return self.real.start(memory)
        return _NothingMoved()


class _RestoredAfterTransfer:
    """A transfer after which some components are again as they were before it."""

    def __init__(self, pending: Any, components: list[torch.Tensor]) -> None:
        self.num_bytes = pending.num_bytes
        self.num_calls = pending.num_calls
        self.seconds = pending.seconds
        self._pending = pending
        self._saved = [(component, component.clone()) for component in components]

    def wait(self) -> None:
        self._pending.wait()
        for component, saved in self._saved:
            component.copy_(saved)


class _LosesComponents:
    """A transport that delivers each bundle but for the components whose cache names hold `lost`."""

    def __init__(self, real: Any, lost: str, transfers: Any, group_rank: int) -> None:
        self.real = real
        self.traits = real.traits
        self._group_rank = group_rank
        self._layers = [
            [view for name, view in zip(layer.names, layer.memory.components, strict=True) if lost in name]
            for layer in transfers._layers
        ]
        self._num_started = 0

    def prepare(self, selection: Any) -> None:
        self.real.prepare(selection)

    def start(self, memory: Any) -> Any:
        index, self._num_started = self._num_started, self._num_started + 1
        lost = [] if memory.owner_rank == self._group_rank else self._layers[index % len(self._layers)]
        return _RestoredAfterTransfer(self.real.start(memory), lost)


class ProbeExtension:
    """Appended to the worker's bases by vLLM."""

    def set_transfer(self, mode: str) -> None:
        """Move blocks by this mode from here on."""
        self._kvpp.transfers.transfer = mode  # type: ignore[attr-defined]

    def set_decode(self, mode: str) -> None:
        """Let decode tokens attend by this mode from here on, where they can attend at the owner at all."""
        decode = self._kvpp.transfers.decode  # type: ignore[attr-defined]
        if decode is not None:
            decode.mode = mode

    def sabotage_decode(self, num_right_layers: int = 0) -> None:
        """Let each rank attend its own heads to whatever it holds, in every layer but the first `num_right_layers`."""
        decode = self._kvpp.transfers.decode  # type: ignore[attr-defined]
        attend, choose = type(decode).attend, type(decode).choose
        right = {place.name for place in decode._walk._places[:num_right_layers]}

        def attend_here(name: str, query: Any, attend_all: Any) -> Any:
            if name in right:
                return attend(decode, name, query, attend_all)
            decode._walk.pass_next(name)
            return attend_all(torch.cat(tuple(query), dim=-1))

        def choose_here(name: str, choices: Any, score: Any) -> Any:
            if name in right:
                return choose(decode, name, choices, score)
            decode._walk.pass_next(name)
            return score()

        decode.attend, decode.choose = attend_here, choose_here
        self._sabotage_reads(decode, right)

    def _sabotage_reads(self, decode: Any, right: set[str]) -> None:
        # Not at the top: without KVPP a worker is to load none of it.
        from vllm_kvpp.vllm_seam.owner_view import OwnerView  # noqa: PLC0415

        self._view_at_owner = getattr(self, "_view_at_owner", OwnerView.__call__)
        reached = []

        def before_read(name: str, num_rows: int) -> None:
            type(decode).before_read(decode, name, num_rows)
            reached.append(name)

        def view(owner_view: OwnerView, cache: torch.Tensor) -> torch.Tensor:
            return self._view_at_owner(owner_view, cache) if reached[-1] in right else cache

        decode.before_read = before_read
        OwnerView.__call__ = view  # type: ignore[method-assign]

    def restore_decode(self) -> None:
        """Let every layer attend to its owner's memory again."""
        decode = self._kvpp.transfers.decode  # type: ignore[attr-defined]
        del decode.attend, decode.choose, decode.before_read
        self._mend_reads()

    def _mend_reads(self) -> None:
        from vllm_kvpp.vllm_seam.owner_view import OwnerView  # noqa: PLC0415

        OwnerView.__call__ = self._view_at_owner  # type: ignore[method-assign]

    def start_trace(self) -> None:
        """Begin to note what runs when, on every thread."""
        self._trace = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._trace.start()

    def stop_trace(self) -> list[tuple[str, int, float, float]]:
        """What ran since `start_trace`, as (name, thread, start, end) in microseconds: transfers, waits, products."""
        self._trace.stop()
        return [
            (event.name, event.thread, event.time_range.start, event.time_range.end)
            for event in self._trace.events()
            if event.name.startswith("kvpp.") or event.name in ("aten::mm", "aten::addmm", "aten::linear", "aten::bmm")
        ]

    def sabotage_transfers(self, moved_layers: list[int]) -> None:
        """Stop moving every layer but these, by place in execution order."""
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        real = getattr(transfers.transport, "real", transfers.transport)
        transfers.transport = _MovesNothing(real, set(moved_layers), transfers.num_layers)

    def lose_components(self, lost: str) -> None:
        """Deliver every bundle but for the components whose cache names hold `lost`."""
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        real = getattr(transfers.transport, "real", transfers.transport)
        transfers.transport = _LosesComponents(real, lost, transfers, self._kvpp._group.rank)  # type: ignore[attr-defined]

    def forget_drafts(self) -> None:
        """Empty this rank's draft caches before every step, unless it is the first of its group."""
        transfers, runner = self._kvpp.transfers, self.model_runner  # type: ignore[attr-defined]
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        targets = {name for layer in transfers._layers for name in layer.names}
        drafts = [
            layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache") and name not in targets
        ]
        execute_model = runner.execute_model

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            if self._kvpp._group.rank != 0:  # type: ignore[attr-defined]
                for cache in drafts:
                    cache.zero_()
            return execute_model(*args, **kwargs)

        runner.execute_model = forgetful

    def restore_transfers(self) -> None:
        """Move every layer again."""
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        transfers.transport = getattr(transfers.transport, "real", transfers.transport)

    def warm_up_runner_v2(self) -> list[int]:
        """Run a dummy step and then the made-up requests of vLLM's kernel warm-up; what they count as steps."""
        from vllm.v1.worker.gpu.warmup import warmup_kernels  # noqa: PLC0415 (the module needs Triton)

        worker: Any = self
        kvpp = getattr(worker, "_kvpp", None)
        counters = kvpp.transfers.counters if kvpp else None
        counts = [counters.steps if counters else 0]
        worker.model_runner._dummy_run(8)
        counts.append(counters.steps if counters else 0)
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        counts.append(counters.steps if counters else 0)
        return counts

    def digest_caches(self) -> dict[str, str]:
        """A fingerprint of each layer's cache, wherever it lies on this rank."""
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        return {
            name: hashlib.sha256(layer.kv_cache.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]
            for name, layer in layers.items()
            if hasattr(layer, "kv_cache")
        }

    def describe_caches(self) -> dict[str, Any]:
        """The bytes of one block of each cache as vLLM itself states them, and the names of those of draft layers."""
        specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
        drafter = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        return {
            "page_bytes": {name: spec.page_size_bytes for name, spec in specs.items()},
            "drafts": sorted(drafter._draft_attn_layer_names) if drafter is not None else [],
        }

    def describe_worker(self) -> dict[str, Any]:
        """What a worker is made of, and which of our modules it has loaded."""
        runner = self.model_runner  # type: ignore[attr-defined]
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        caches = [layer.kv_cache for layer in layers.values() if hasattr(layer, "kv_cache")]
        return {
            "class": type(self).__mro__[0].__name__,
            "modules": sorted(name for name in sys.modules if name.startswith("vllm_kvpp")),
            "num_process_groups": len(dist.distributed_c10d._world.pg_map),
            "wrapped_layers": sum("prepare_kv_cache_update" in vars(layer) for layer in layers.values()),
            "is_runner_wrapped": "execute_model" in vars(runner),
            "num_model_hooks": len(runner.get_model()._forward_pre_hooks),
            "cache_bytes": sum({c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in caches}.values()),
        }
