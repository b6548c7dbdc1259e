"""The explanation in plain values, for `--json`."""

from dataclasses import asdict
from typing import Any

from vllm_kvpp import __version__
from vllm_kvpp.explain.explanation import Explanation
from vllm_kvpp.explain.gain import Gain
from vllm_kvpp.explain.sentences import describe_kvpp, describe_relation, describe_scope


def make_document(explanation: Explanation) -> dict[str, Any]:
    """Write the explanation in plain values; what the log leaves out is null."""
    startup, blocks = explanation.startup, explanation.blocks
    return {
        "version": __version__,
        "source": explanation.source,
        "num_starts": explanation.num_starts,
        "settings": asdict(startup.settings),
        "memories": [asdict(memory) for memory in startup.memories],
        "engines": [asdict(pool) for pool in startup.pools],
        "blocks": None
        if blocks is None
        else {
            **asdict(blocks),
            "num_tokens": blocks.num_tokens,
            "num_longest_requests": blocks.num_longest_requests,
        },
        "kvpp": {"is_on": startup.kvpp.is_on, **asdict(startup.kvpp)},
        "with_kvpp": _describe_gain(explanation.gain),
        "explanations": {
            "scope": list(describe_scope(explanation)),
            "relation": list(describe_relation(explanation)),
            "kvpp": list(describe_kvpp(explanation)),
        },
        "notes": list(explanation.notes),
    }


def _describe_gain(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    if gain.plan is None:
        return {"refusal": gain.refusal}
    capacity = gain.plan.capacity
    return {
        "refusal": None,
        "model": gain.plan.model.name,
        "group_size": capacity.group_size,
        "block_size": capacity.block_size,
        "num_blocks": capacity.num_blocks,
        "num_blocks_without_kvpp": capacity.num_blocks_without,
        "num_tokens": capacity.num_tokens,
        "num_tokens_without_kvpp": capacity.num_tokens_without,
        "factor": capacity.factor,
    }
