"""A transport that moves nothing and writes down what it was asked, for tests of what runs when."""

from dataclasses import dataclass, field

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, TransferSeconds, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer


@dataclass
class RecordedTransfer:
    """A started transfer; `failure` is raised by `wait`."""

    memory: BundleMemory
    selection: Selection
    log: list[tuple[str, BundleMemory]]
    failure: Exception | None = None
    num_calls: int = 1
    has_waited: bool = False

    @property
    def num_bytes(self) -> int:
        """The bytes that the selection moves."""
        if self.selection.way is Way.WHOLE:
            return self.memory.whole.numel()
        return self.selection.blocks.num_blocks * self.memory.page_size_bytes

    def wait(self) -> None:
        """Write down the wait, then fail if told to."""
        self.log.append(("wait", self.memory))
        self.has_waited = True
        if self.failure is not None:
            raise self.failure

    def seconds(self) -> TransferSeconds | None:
        """Three seconds, one of them waited for, once the wait is written down."""
        return TransferSeconds(total=3.0, waited=1.0) if self.has_waited else None


@dataclass
class RecordingTransport:
    """`log` holds ("start" or "wait", memory) in the order of the calls, `prepared` the selection of every step."""

    log: list[tuple[str, BundleMemory]] = field(default_factory=list)
    prepared: list[Selection] = field(default_factory=list)
    failure: Exception | None = None
    traits: LinkTraits = field(default_factory=lambda: LinkTraits(call_bytes=0))

    def prepare(self, selection: Selection) -> None:
        """Write down the selection."""
        self.prepared.append(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """Write down the start."""
        self.log.append(("start", memory))
        selection = self.prepared[-1] if self.prepared else Selection(Way.WHOLE, BlockRuns())
        return RecordedTransfer(memory, selection, self.log, self.failure)
