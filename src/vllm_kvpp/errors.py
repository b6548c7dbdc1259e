"""Every error the package raises on purpose.

```text
KVPPError
├── KVPPConfigError    the user's settings, listed with a remedy for each reason
├── KVPPSeamError      the installed vLLM lacks a symbol or has changed one we rely on
├── KVPPBudgetError    the KV cache memory does not hold what has to be held
├── KVPPRankMismatchError  the ranks of one group disagree about plan or memory
├── KVPPTransferError  a transfer did not finish within its limit, or its peer is gone
├── KVPPOrderError     a layer used its cache outside the order that keeps the KV correct
├── DemoError          `vllm-kvpp demo` cannot go on (in `vllm_kvpp.demo.errors`)
├── DoctorError        `vllm-kvpp doctor` cannot read the command line that it was given (in `vllm_kvpp.doctor.errors`)
├── ExplainError       `vllm-kvpp explain` cannot explain the log (in `vllm_kvpp.explain.errors`)
└── PlannerError       `vllm-kvpp plan` has no plan for what it was asked (in `vllm_kvpp.planner.errors`)
```

None derives from `ValueError`: pydantic would fold such an error, raised while vLLM builds its configuration, into a
validation report whose last lines dump every argument, and the remedy would drown in it.
"""

from collections.abc import Sequence


class KVPPError(Exception):
    """Base of all errors raised on purpose by this package."""


class KVPPConfigError(KVPPError):
    """The configuration cannot run with KVPP.

    `reasons` holds one line per reason, all that apply, each with the setting as typed and a remedy.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"KVPP cannot run with this configuration:\n{lines}")


class KVPPSeamError(KVPPError):
    """The installed vLLM is not one this version can attach to."""


class KVPPBudgetError(KVPPError):
    """The available KV cache memory is too small, or would be exceeded."""


class KVPPRankMismatchError(KVPPError):
    """Ranks of one KVPP group computed different plans."""


class KVPPTransferError(KVPPError):
    """A layer's transfer failed or did not finish in time."""


class KVPPOrderError(KVPPError):
    """A layer was reached out of order, twice in one forward, or not at all."""
