"""Chunked prefill and prefix caching for MLA on CPU."""

from functools import wraps
from typing import Any

from vllm.platforms.cpu import CpuPlatform


def apply() -> None:
    """Keep the three settings that the platform forces for MLA as the user gave them."""
    original = CpuPlatform.check_and_update_config.__func__

    @wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens)
        original(cls, vllm_config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = kept

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
