"""The error of the planner."""

from vllm_kvpp.errors import KVPPError


class PlannerError(KVPPError):
    """The plan cannot be made; the message is one line that names the setting, what was found and what would do."""
