"""The error of `vllm-kvpp doctor`."""

from vllm_kvpp.errors import KVPPError


class DoctorError(KVPPError):
    """The command line is none that can be looked at; the message is one line that says what would do."""
