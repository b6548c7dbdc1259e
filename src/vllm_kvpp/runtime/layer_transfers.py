"""One forward's transfers: start the first layer's, wait for each, start the next, and leave nothing behind.

```text
step(history) ── start_forward ── before_layer(0) ── before_layer(1) ── … ── before_layer(L-1) ── end of step
                 start 0          wait 0, start 1    wait 1, start 2         wait L-1             all seen? reset
```

Whether and what to transfer follows from the step and the plan alone, so every rank decides alike. Where decode rows
attend to the owners' memory (`owner_decode`), the history of the other requests is transferred, or nothing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.plan.transfer_way import StageShape, choose_way
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.history import DecodeRows, Step
from vllm_kvpp.runtime.owner_decode import OwnerDecode
from vllm_kvpp.runtime.ranges import WAIT_RANGE, profile_range
from vllm_kvpp.selection import BlockRuns, Selection, TransferMode
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
    `decode` is None where the history of decode rows always moves. `transport` and `transfer`, the mode, may be
    exchanged between steps, on all ranks of the group alike.
    """

    def __init__(
        self,
        layers: Sequence[TargetLayer],
        transport: Transport,
        group_label: str,
        transfer: TransferMode = "auto",
        decode: OwnerDecode | None = None,
    ) -> None:
        self.transport = transport
        self.decode = decode
        self.transfer: TransferMode = transfer
        self._layers = tuple(layers)
        self._index_by_name = {name: index for index, layer in enumerate(self._layers) for name in layer.names}
        self._shape = describe_stage(self._layers)
        self._group_label = group_label
        self.counters = TransferCounters()
        self._step = Step()
        self._has_started = False
        self._moved_blocks = BlockRuns()
        self._next_index = 0
        self._pending: PendingTransfer | None = None
        self._unmeasured: deque[PendingTransfer] = deque()

    @property
    def num_layers(self) -> int:
        """Target layers of the stage."""
        return len(self._layers)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Enclose one step: with history its blocks are brought, layer by layer, without nothing moves (R-RUN-3).

        Whatever happens inside, the state is reset at the end, and no transfer is left under way (R-RUN-5).

        Raises:
            KVPPOrderError: the model ran, but some layer read its cache without having waited for it.
            KVPPTransferError: another rank has not come to the end of the step before, or is gone.
        """
        assert not self._step.has_history, "a step began before the last one had ended"
        if self.decode is not None:
            self.decode.before_step()
        self.counters.steps += 1
        self.counters.steps_with_history += int(step.has_history)
        self._step = step
        self._moved_blocks = step.active_blocks
        try:
            yield
            self._check_all_layers_waited()
        finally:
            self._reset()

    @property
    def asks_for_rows(self) -> bool:
        """Whether the forward that is about to start may attend decode rows to the owners' memory."""
        return self.decode is not None and self._step.has_history

    def start_forward(self, rows: DecodeRows | None = None) -> None:
        """Start the first layer's transfer; called when the model's inputs and caches are ready, before it runs.

        `rows` are the batch's decode rows, None if they are not known.

        Raises:
            KVPPOrderError: the model has run in this step before.
            KVPPTransferError: another rank is gone or stuck.
        """
        if not self._step.has_history:
            return
        if self._has_started:
            raise KVPPOrderError("The model ran twice in one step; KVPP brings a step's caches once.")
        self._has_started = True
        self._moved_blocks = self._find_moved_blocks(rows)
        if not self._moved_blocks or not self._layers:
            return
        self.counters.steps_with_transfers += 1
        with self._named_failure(self._layers[0]):
            self.transport.prepare(self._select())
        self._start_next()

    def _find_moved_blocks(self, rows: DecodeRows | None) -> BlockRuns:
        share = self.decode.begin(self._step, rows, self.transfer, self.counters) if self.decode is not None else None
        return self._step.active_blocks if share is None else share.other_blocks

    def _select(self) -> Selection:
        blocks = self._moved_blocks
        return Selection(choose_way(self.transfer, blocks, self._shape, self.transport.traits), blocks)

    def before_layer(self, name: str) -> None:
        """Wait for the layer of cache `name`, then start the next layer's transfer.

        In a step without transfers, and for another cache of the layer that has just been waited for, there is nothing
        to do.

        Raises:
            KVPPOrderError: the layer is neither the next in order nor the current one, or another of its caches should
                have been reached first.
            KVPPTransferError: its transfer failed, or did not finish in time.
        """
        if not self._moved_blocks:
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
        self.counters.transferred_blocks += pending.num_bytes // layer.memory.page_size_bytes
        self.counters.calls += pending.num_calls

    def _wait(self, pending: PendingTransfer, layer: TargetLayer) -> None:
        with self._named_failure(layer), profile_range(WAIT_RANGE):
            pending.wait()
        self._unmeasured.append(pending)

    def _measure(self) -> None:
        # In the order of the device, and without waiting for it: what is not known yet is looked at after a later step.
        while self._unmeasured and (seconds := self._unmeasured[0].seconds()) is not None:
            self.counters.add_seconds(seconds)
            self._unmeasured.popleft()

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
        if self.decode is not None:
            self.decode.check_all_attended()
        if not self._moved_blocks or self._next_index == len(self._layers):
            return
        raise KVPPOrderError(
            f"{self._layers[self._next_index].label} did not wait for its cache in this step, so its results are "
            "wrong. A recorded graph or a fused operation passes KVPP's hook by; run with --enforce-eager."
        )

    def _reset(self) -> None:
        pending, self._pending = self._pending, None
        if self.decode is not None:
            self.decode.reset()
        self._step = Step()
        self._has_started = False
        self._moved_blocks = BlockRuns()
        self._next_index = 0
        self._measure()
        if pending is not None:
            self._drain(pending)

    def _drain(self, pending: PendingTransfer) -> None:
        # The forward failed with a prefetch under way. The next forward may write what it reads, so it ends first; an
        # error of its own would hide the one that is already on its way up.
        try:
            pending.wait()
        except (TimeoutError, RuntimeError):
            return


def describe_stage(layers: Sequence[TargetLayer]) -> StageShape:
    """What the layers' bundles hold, all together."""
    memories = [layer.memory for layer in layers]
    return StageShape(
        num_blocks=memories[0].components[0].shape[0] if memories else 0,
        num_layers=len(memories),
        num_components=sum(len(memory.components) for memory in memories),
        page_size_bytes=sum(memory.page_size_bytes for memory in memories),
    )
