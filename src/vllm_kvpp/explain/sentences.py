"""The figures of a log in sentences: what they count, why they differ, and what KVPP makes of them."""

from vllm_kvpp.explain.explanation import Explanation
from vllm_kvpp.explain.figures import PoolBlocks, is_derived_from_concurrency, show_tokens
from vllm_kvpp.explain.pool_lines import Pool
from vllm_kvpp.planner.planning import Plan

# Above this, plan and log are about different caches, and not about a rounded amount of memory.
LARGE_DIFFERENCE = 0.02
SWITCH = "--additional-config '{\"enable_kvpp\": true}'"


def describe_scope(explanation: Explanation) -> tuple[str, ...]:
    """Which figures are of one rank, and which of an engine or of all."""
    return (*_describe_pool(explanation), *_describe_replicas(explanation), *_describe_memory(explanation))


def describe_relation(explanation: Explanation) -> tuple[str, ...]:
    """How tokens and concurrency hang together, and why one is not the other divided by the length."""
    pool, blocks = explanation.pool, explanation.blocks
    if pool is None or pool.concurrency is None or not pool.max_model_len:
        return ()
    lines = (_describe_formula(pool, blocks),) if pool.num_tokens is not None else ()
    return lines if blocks is None else (*lines, *_describe_waste(blocks), _describe_held_back(blocks))


def describe_kvpp(explanation: Explanation) -> tuple[str, ...]:
    """What KVPP gives, or would give."""
    kvpp, settings, gain = explanation.startup.kvpp, explanation.startup.settings, explanation.gain
    if gain is None:
        return (_describe_what_kvpp_gave(explanation),)
    if kvpp.has_no_effect:
        return ("enable_kvpp is set, but has no effect: the group has 1 rank. Set tensor_parallel_size to 2 or more.",)
    lines: tuple[str, ...] = ()
    if settings.asks_for_kvpp:
        lines = (
            "enable_kvpp is set, but the log has no line of KVPP: the plugin was not loaded, and vLLM passes over "
            "keys that nobody reads. Run `vllm-kvpp doctor` where the server runs.",
        )
    if gain.plan is None:
        return (*lines, f"No gain is worked out: {gain.refusal}")
    return (*lines, *_describe_what_kvpp_would_give(explanation, gain.plan))


def _describe_pool(explanation: Explanation) -> tuple[str, ...]:
    settings = explanation.startup.settings
    if explanation.pool is None:
        return ("The log says the memory, but not what fits into it: the start went no further, or lines are missing.",)
    ranks = f"the {settings.tp_size} ranks" if (settings.tp_size or 1) > 1 else "the ranks"
    text = (
        f"Tokens and concurrency are of the whole engine, not of one rank: {ranks} of a tensor-parallel group cache "
        "the same tokens, so do not multiply by tensor_parallel_size."
    )
    if (settings.pp_size or 1) > 1:
        text += f" Each of the {settings.pp_size} pipeline stages caches them for its own layers."
    if explanation.gain is not None and explanation.gain.plan is not None:
        text += " This is an MLA model: each rank keeps a full copy of every layer of its stage."
    return (text,)


def _describe_replicas(explanation: Explanation) -> tuple[str, ...]:
    pools = explanation.startup.pools
    dp_size = explanation.startup.settings.dp_size or 1
    if len(pools) > 1:
        total = sum(pool.num_tokens or 0 for pool in pools)
        return (f"{len(pools)} engines say theirs, each with a cache of its own: {total:,} tokens together.",)
    if dp_size > 1 and pools:
        return (f"The server has {dp_size} engines (data_parallel_size), each with a cache like this one.",)
    return ()


def _describe_memory(explanation: Explanation) -> tuple[str, ...]:
    memories = explanation.startup.memories
    if not memories:
        return ()
    text = (
        "The memory is of one rank. vLLM works out the blocks of every rank and takes the fewest for all: the rank "
        "with the least memory decides."
    )
    if explanation.startup.settings.device != "cpu":
        text += " On GPUs only the first rank of each node says its memory, so another may have less."
    return (text,)


def _describe_formula(pool: Pool, blocks: PoolBlocks | None) -> str:
    tokens, length, concurrency = pool.num_tokens, pool.max_model_len, pool.concurrency
    assert tokens is not None
    assert length is not None
    assert concurrency is not None
    if not is_derived_from_concurrency(pool):
        return (
            f"{tokens:,} tokens ÷ {length:,} = {tokens / length:,.2f}, but the concurrency is {concurrency:,.2f}: this "
            "vLLM counts tokens as blocks times block size, and the concurrency in whole blocks"
            f"{_of_request(blocks) if blocks else ' of a request, of every group of layers'}."
        )
    if blocks is None:
        return (
            f"{tokens:,} tokens ÷ {length:,} = {concurrency:,.2f}: vLLM 0.32 works out the concurrency, from blocks, "
            "and prints it times max_model_len as the tokens. They agree by definition."
        )
    return (
        f"The concurrency comes first: {blocks.num_blocks:,} blocks ÷ {blocks.per_request:,} blocks"
        f"{_of_request(blocks)} = {concurrency:,.2f}. The tokens are that times {length:,}, rounded down, so the two "
        "agree by definition."
    )


def _of_request(blocks: PoolBlocks) -> str:
    return f" of a request of {blocks.max_model_len:,} tokens"


def _describe_waste(blocks: PoolBlocks) -> tuple[str, ...]:
    if blocks.wasted_tokens == 0:
        return ()
    held = blocks.per_request * blocks.block_size
    return (
        f"A request of {blocks.max_model_len:,} tokens takes {blocks.per_request:,} whole blocks, which hold {held:,}; "
        f"{blocks.wasted_tokens} stay empty. All blocks full are {blocks.num_tokens:,} tokens, which shorter requests "
        "can come nearer to.",
    )


def _describe_held_back(blocks: PoolBlocks) -> str:
    return (
        "vLLM holds one block back, which both figures count as if it were free. Requests of "
        f"{blocks.max_model_len:,} tokens that run at once: {blocks.num_longest_requests:,}."
    )


def _describe_what_kvpp_gave(explanation: Explanation) -> str:
    kvpp = explanation.startup.kvpp
    fewest = kvpp.fewest
    if fewest is None or not fewest.num_tokens or not fewest.num_tokens_without:
        return f"KVPP is on{f', group size {kvpp.group_size}' if kvpp.group_size else ''}; the figures are with it."
    return (
        f"KVPP is on, group size {fewest.group_size}; the figures are with it. Its blocks hold {fewest.num_tokens:,} "
        f"tokens, where the same memory would hold {fewest.num_tokens_without:,} without it: "
        f"{fewest.num_tokens / fewest.num_tokens_without:.2f} times as many."
    )


def _describe_what_kvpp_would_give(explanation: Explanation, plan: Plan) -> tuple[str, ...]:
    capacity, pool = plan.capacity, explanation.pool
    with_kvpp, without = capacity.num_tokens, capacity.num_tokens_without
    if capacity.factor <= 1:
        return (f"KVPP does not pay here: {with_kvpp:,} tokens instead of {without:,}. Leave it off.",)
    lines = [
        f"With KVPP the same memory would hold {with_kvpp:,} tokens instead of {without:,}, {capacity.factor:.2f} "
        f"times as many, on a group of {capacity.group_size} ranks: add {SWITCH}. `vllm-kvpp doctor` says whether your "
        "command line allows it, and `vllm-kvpp plan` what it costs in traffic."
    ]
    if pool is not None and pool.max_model_len:
        lines += [_show_the_lines_with_kvpp(plan, pool.max_model_len), *_compare_with_log(plan, pool)]
    return tuple(lines)


def _show_the_lines_with_kvpp(plan: Plan, max_model_len: int) -> str:
    num_blocks, per_request = plan.capacity.num_blocks, -(-max_model_len // plan.capacity.block_size)
    return (
        "vLLM 0.32 would then say about: KV cache size: "
        f"{show_tokens(num_blocks, per_request, max_model_len):,} tokens, Maximum concurrency for "
        f"{max_model_len:,} tokens per request: {num_blocks / per_request:.2f}x"
    )


def _compare_with_log(plan: Plan, pool: Pool) -> tuple[str, ...]:
    if not pool.num_tokens or not pool.max_model_len:
        return ()
    per_request = -(-pool.max_model_len // plan.capacity.block_size)
    planned = show_tokens(plan.capacity.num_blocks_without, per_request, pool.max_model_len)
    if abs(planned / pool.num_tokens - 1) <= LARGE_DIFFERENCE:
        return ()
    return (
        f"Beware: without KVPP the plan finds {planned:,} tokens where the log has {pool.num_tokens:,}. The model, the "
        "cache's type or the block size is not what was assumed; give --model or --block-size before you rely on it.",
    )
