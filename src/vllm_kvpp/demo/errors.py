"""Why the demo stops before it has a result."""

from vllm_kvpp.errors import KVPPError


class DemoError(KVPPError):
    """The demo cannot run here, or a server it started failed; the message says what to change."""
