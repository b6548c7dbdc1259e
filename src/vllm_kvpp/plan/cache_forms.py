"""The forms in which a layer's caches are stored, as components of its bundle (R-LAY-2).

Sizes are bytes per token. Where vLLM runs, they come from its cache specs; these are for planning without it, and for
layouts that keep quantised values and their scales in tensors of their own.
"""

from dataclasses import dataclass

from vllm_kvpp.plan.bundles import LayerCache

# DeepSeek-V3.2's formats: one 32-bit scale for each 128 values, rotary part and its neighbours in 16 bits.
SCALE_GROUP = 128
SCALE_BYTES = 4
ROTARY_BYTES = 2


@dataclass(frozen=True)
class CacheForm:
    """What one token takes in one cache; `scale_bytes` are apart in a component of their own, if there are any."""

    value_bytes: int
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """All components together."""
        return self.value_bytes + self.scale_bytes

    def make_caches(self, name: str, block_size: int) -> tuple[LayerCache, ...]:
        """The cache `name` as one component, or as two: `name` with the values and `name.scale` with the scales."""
        values = LayerCache(name, self.value_bytes * block_size)
        if self.scale_bytes == 0:
            return (values,)
        return (values, LayerCache(f"{name}.scale", self.scale_bytes * block_size))


def plain_latent(kv_lora_rank: int, rotary_width: int, bytes_per_value: int) -> CacheForm:
    """MLA's latent and rotary key in one type: 4, 2 or, as fp8 with a scale for the whole layer, 1 byte a value."""
    return CacheForm((kv_lora_rank + rotary_width) * bytes_per_value)


def quantised_latent(kv_lora_rank: int, rotary_width: int, *, has_scales_apart: bool = False) -> CacheForm:
    """An 8-bit latent with a scale for each group, and a 16-bit rotary key.

    In one piece this is vLLM's `fp8_ds_mla` (656 bytes for 512 + 64); with scales apart, the layout of SFA-C8.

    Raises:
        ValueError: the latent is not a whole number of groups.
    """
    return _quantised(kv_lora_rank, rotary_width * ROTARY_BYTES, has_scales_apart)


def quantised_indexer(head_width: int, *, has_scales_apart: bool = False) -> CacheForm:
    """An 8-bit indexer key with a scale for each group.

    In one piece this is vLLM's indexer cache (132 bytes for 128); with scales apart, the layout of LI-C8.

    Raises:
        ValueError: the key is not a whole number of groups.
    """
    return _quantised(head_width, 0, has_scales_apart)


def _quantised(num_values: int, other_bytes: int, has_scales_apart: bool) -> CacheForm:
    if num_values <= 0 or num_values % SCALE_GROUP:
        raise ValueError(f"{num_values} values are not a whole number of groups of {SCALE_GROUP}")
    scale_bytes = num_values // SCALE_GROUP * SCALE_BYTES
    value_bytes = num_values + other_bytes
    return CacheForm(value_bytes, scale_bytes) if has_scales_apart else CacheForm(value_bytes + scale_bytes)
