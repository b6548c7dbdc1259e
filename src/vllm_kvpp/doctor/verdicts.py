"""What a server would do with the command line, in sentences."""

from vllm_kvpp.doctor.diagnosis import Diagnosis
from vllm_kvpp.vllm_seam.findings import Outcome, Verdict

TITLES: dict[Outcome, str] = {
    "off": "KVPP is off",
    "on": "KVPP would run",
    "no effect": "KVPP would have no effect",
    "not loaded": "KVPP would silently not run",
    "refused": "KVPP refuses this command line",
    "refused by vLLM": "vLLM refuses this command line",
    "malformed": "vLLM cannot read this command line",
}
IN_PLACE = "every rank reads the owners' memory in place"
SWITCH = "--additional-config '{\"enable_kvpp\": true}'"


def describe_title(diagnosis: Diagnosis) -> str:
    """The outcome in a few words."""
    if diagnosis.verdict is None:
        return "The command line was not checked, since vLLM cannot be asked"
    return TITLES[diagnosis.verdict.outcome]


def describe_verdict(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What follows for the user."""
    verdict = diagnosis.verdict
    if verdict is None:
        return ()
    if verdict.outcome in ("refused", "refused by vLLM"):
        return verdict.reasons
    if verdict.outcome == "off":
        return (f"Nothing of it runs, and the server starts as without it. {SWITCH} turns it on.",)
    if verdict.outcome == "not loaded":
        return ("enable_kvpp is true, but the plugin is not loaded, and vLLM passes over keys that nobody reads.",)
    if verdict.outcome == "no effect":
        return (
            "enable_kvpp is true, but the group has 1 rank (tensor_parallel_size * prefill_context_parallel_size). Set "
            "tensor_parallel_size to 2 or more to use it.",
        )
    return ("The server would start with it; no weight has been loaded to find that out.",)


def list_facts(diagnosis: Diagnosis) -> tuple[tuple[str, str], ...]:
    """What the finished configuration says, as names and values."""
    verdict = diagnosis.verdict
    if verdict is None or verdict.group_size is None:
        return ()
    facts = [
        ("model", f"{verdict.model} ({verdict.architecture})"),
        ("attention backend", str(verdict.attention_backend)),
        ("group size", str(verdict.group_size)),
    ]
    if verdict.outcome == "on":
        facts += [(f"kvpp.{name}", _show(value)) for name, value in verdict.options.items()]
        facts += [("decode", _describe_decode(verdict))]
        facts += [("KVPP says", message) for message in verdict.messages]
    return tuple(facts)


def _describe_decode(verdict: Verdict) -> str:
    asked = verdict.options["decode"]
    if asked == "transfer":
        return "history is moved to every rank, as kvpp.decode says"
    if asked == "owner":
        return "tokens attend at each layer's owner"
    if asked == "in_place":
        return f"{IN_PLACE}; a start is refused where they cannot share it"
    if verdict.in_place_obstacle is None:
        return f"{IN_PLACE}; where a start finds that they cannot share it, {_describe_other_ways(verdict)}"
    if verdict.decode_obstacle is None:
        return f"{_describe_other_ways(verdict)}; it cannot be read in place ({verdict.in_place_obstacle})"
    return _describe_other_ways(verdict)


def _describe_other_ways(verdict: Verdict) -> str:
    """What `auto` chooses from where it cannot read in place."""
    if verdict.decode_obstacle is not None:
        return f"history is moved to every rank, since tokens cannot attend at the owner ({verdict.decode_obstacle})"
    return "tokens attend at each layer's owner, or history is moved where that is cheaper"


def _show(value: object) -> str:
    return "chosen by KVPP" if value is None else str(value)
