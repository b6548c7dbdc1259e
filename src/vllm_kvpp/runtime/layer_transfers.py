"""One forward's transfers: start the first layer's, wait for each, start the next, and leave nothing behind.

```text
step(history) ── start_forward ── before_layer(0) ── before_layer(1) ── … ── before_layer(L-1) ── end of step
                 start 0          wait 0, start 1    wait 1, start 2         wait L-1             all seen? reset
```

Whether and what to transfer follows from the step and the plan alone, so every rank decides alike.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer, Transport


@dataclass(frozen=True)
class TargetLayer:
    """One target layer of this stage: the names of its caches, and its bundle's memory on this rank.

    `entry` is the cache that a forward touches first, before which the layer has to wait; None if any may be first.
    """

    names: tuple[str, ...]
    memory: BundleMemory
    entry: str | None = None

    @property
    def label(self) -> str:
        """How messages call the layer."""
        return " + ".join(self.names)


class LayerTransfers:
    """Runs the transfers of one stage on one rank, one forward at a time.

    `layers` are all target layers of the stage in execution order. `group_label` names the group in messages.
    `transport` may be exchanged between steps, on all ranks of the group alike.
    """

    def __init__(self, layers: Sequence[TargetLayer], transport: Transport, group_label: str) -> None:
        self.transport = transport
        self._layers = tuple(layers)
        self._index_by_name = {name: index for index, layer in enumerate(self._layers) for name in layer.names}
        self._group_label = group_label
        self.counters = TransferCounters()
        self._is_active = False
        self._has_started = False
        self._next_index = 0
        self._pending: PendingTransfer | None = None

    @property
    def num_layers(self) -> int:
        """Target layers of the stage."""
        return len(self._layers)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Enclose one step: with history its layers' caches are brought, without nothing moves (R-RUN-3).

        Whatever happens inside, the state is reset at the end, and no transfer is left under way (R-RUN-5).

        Raises:
            KVPPOrderError: the model ran, but some layer read its cache without having waited for it.
        """
        assert not self._is_active, "a step began before the last one had ended"
        self.counters.steps += 1
        self.counters.steps_with_history += int(step.has_history)
        self._is_active = step.has_history
        try:
            yield
            self._check_all_layers_waited()
        finally:
            self._reset()

    def start_forward(self) -> None:
        """Start the first layer's transfer; called when the model's inputs and caches are ready, before it runs."""
        if not self._is_active:
            return
        if self._has_started:
            raise KVPPOrderError("The model ran twice in one step; KVPP brings a step's caches once.")
        self._has_started = True
        self._start_next()

    def before_layer(self, name: str) -> None:
        """Wait for the layer of cache `name`, then start the next layer's transfer.

        Outside a step with history, and for another cache of the layer that has just been waited for, there is nothing
        to do.

        Raises:
            KVPPOrderError: the layer is neither the next in order nor the current one, or another of its caches should
                have been reached first.
            KVPPTransferError: its transfer failed, or did not finish in time.
        """
        if not self._is_active:
            return
        index = self._index_by_name[name]
        if index == self._next_index - 1:
            return
        if self._pending is None or index != self._next_index:
            raise KVPPOrderError(self._describe_disorder(name))
        layer = self._layers[index]
        if layer.entry not in (None, name):
            raise KVPPOrderError(
                f"{name} was reached before {layer.entry} of the same layer, which is read first and has not waited. "
                "A fused operation passes KVPP's hook by."
            )
        # Taken before the wait: one that fails is not waited for again at the end of the step.
        pending, self._pending = self._pending, None
        self._wait(pending, layer)
        self._next_index += 1
        self._start_next()

    def _start_next(self) -> None:
        if self._next_index == len(self._layers):
            return
        layer = self._layers[self._next_index]
        with self._named_failure(layer):
            pending = self.transport.start(layer.memory)
        self._pending = pending
        self.counters.transfers += 1
        self.counters.transferred_bytes += pending.num_bytes

    def _wait(self, pending: PendingTransfer, layer: TargetLayer) -> None:
        started = time.perf_counter()
        try:
            with self._named_failure(layer):
                pending.wait()
        finally:
            self.counters.host_wait_seconds += time.perf_counter() - started

    @contextmanager
    def _named_failure(self, layer: TargetLayer) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, RuntimeError) as error:
            raise KVPPTransferError(
                f"The transfer of {layer.label} from owner rank {layer.memory.owner_rank} failed in the KVPP group "
                f"{self._group_label}: {error}. A rank of the group is gone or stuck: see its log. If transfers need "
                "longer, raise kvpp.transfer_timeout_seconds."
            ) from error

    def _describe_disorder(self, name: str) -> str:
        if not self._has_started:
            return f"{name} was reached before the model's forward began; KVPP could not start its transfer."
        expected = self._layers[self._next_index].label if self._next_index < len(self._layers) else "no further layer"
        return (
            f"{name} was reached out of order: KVPP expected {expected}. Its cache has not been brought, or its "
            "scratch buffer has been handed on."
        )

    def _check_all_layers_waited(self) -> None:
        if not self._is_active or self._next_index == len(self._layers):
            return
        raise KVPPOrderError(
            f"{self._layers[self._next_index].label} did not wait for its cache in this step, so its results are "
            "wrong. A recorded graph or a fused operation passes KVPP's hook by; run with --enforce-eager."
        )

    def _reset(self) -> None:
        pending, self._pending = self._pending, None
        self._is_active = False
        self._has_started = False
        self._next_index = 0
        if pending is not None:
            self._drain(pending)

    def _drain(self, pending: PendingTransfer) -> None:
        # The forward failed with a prefetch under way. The next forward may write what it reads, so it ends first; an
        # error of its own would hide the one that is already on its way up.
        try:
            pending.wait()
        except (TimeoutError, RuntimeError):
            return
