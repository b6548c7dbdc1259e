"""The error of `vllm-kvpp explain`."""

from vllm_kvpp.errors import KVPPError


class ExplainError(KVPPError):
    """The log cannot be explained; the message is one line that says what was found and what would do."""
