"""Which way a step's blocks travel: by bytes and by number of calls, the same on every rank."""

from dataclasses import dataclass

from vllm_kvpp.selection import BlockRuns, LinkTraits, TransferMode, Way


@dataclass(frozen=True)
class StageShape:
    """What the target layers of a stage hold, all together.

    `num_components` counts cache tensors over all layers, `page_size_bytes` is what one block takes over all layers.
    """

    num_blocks: int
    num_layers: int
    num_components: int
    page_size_bytes: int

    def bytes_moved(self, way: Way, blocks: BlockRuns) -> int:
        """Bytes that one step moves."""
        return self.page_size_bytes * (self.num_blocks if way is Way.WHOLE else blocks.num_blocks)

    def count_calls(self, way: Way, blocks: BlockRuns, blocks_per_chunk: int) -> int:
        """Calls that one step makes, if staging memory takes `blocks_per_chunk` blocks of a bundle at once."""
        if way is Way.WHOLE:
            return self.num_layers
        if way is Way.RUNS:
            return self.num_components * len(blocks.runs)
        return self.num_layers * -(-blocks.num_blocks // blocks_per_chunk)


def choose_way(mode: TransferMode, blocks: BlockRuns, shape: StageShape, link: LinkTraits) -> Way:
    """Choose the cheapest way that `mode` allows: `full` only whole bundles, `active` only `blocks`, `auto` any."""
    if mode == "full":
        return Way.WHOLE
    ways = [Way.RUNS]
    if link.blocks_per_chunk > 0:
        ways.append(Way.STAGED)
    if mode == "auto":
        ways.append(Way.WHOLE)
    # The first of equals, so one that moves fewer bytes.
    return min(ways, key=lambda way: estimate_cost(way, blocks, shape, link))


def estimate_cost(way: Way, blocks: BlockRuns, shape: StageShape, link: LinkTraits) -> float:
    """What one step's transfers cost, in bytes that the link carries in the same time."""
    num_bytes = shape.bytes_moved(way, blocks)
    staging = link.staging_factor * num_bytes if way is Way.STAGED else 0.0
    calls = link.call_bytes * shape.count_calls(way, blocks, link.blocks_per_chunk)
    return num_bytes + staging + calls + link.layer_bytes * shape.num_layers
