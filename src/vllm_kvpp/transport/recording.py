"""A transport that moves nothing and writes down what it was asked, for tests of what runs when."""

from dataclasses import dataclass, field

from vllm_kvpp.transport.base import BundleMemory, PendingTransfer


@dataclass
class RecordedTransfer:
    """A started transfer; `failure` is raised by `wait`."""

    memory: BundleMemory
    log: list[tuple[str, BundleMemory]]
    failure: Exception | None = None

    @property
    def num_bytes(self) -> int:
        """The bundle's bytes."""
        return self.memory.whole.numel()

    def wait(self) -> None:
        """Write down the wait, then fail if told to."""
        self.log.append(("wait", self.memory))
        if self.failure is not None:
            raise self.failure


@dataclass
class RecordingTransport:
    """`log` holds ("start" or "wait", memory) in the order of the calls."""

    log: list[tuple[str, BundleMemory]] = field(default_factory=list)
    failure: Exception | None = None

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """Write down the start."""
        self.log.append(("start", memory))
        return RecordedTransfer(memory, self.log, self.failure)
