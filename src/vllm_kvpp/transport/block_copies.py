"""Copies of blocks between tensors on the host, and where a chunk lies in staging memory."""

from collections.abc import Iterator

import torch

from vllm_kvpp.selection import BlockRuns


def copy_blocks(source: torch.Tensor, source_blocks: BlockRuns, target: torch.Tensor, target_blocks: BlockRuns) -> None:
    """Copy blocks between two `[num_blocks, page_size_bytes]` uint8 host tensors, in order.

    Copies of one thread, by numpy: torch would start a team of OpenMP threads beside the one that computes.
    """
    read, written = source.numpy(), target.numpy()
    for (first, end), (to, to_end) in _pair_runs(source_blocks, target_blocks):
        written[to:to_end] = read[first:end]


def _pair_runs(left: BlockRuns, right: BlockRuns) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Cut two sets of equally many blocks into runs of equal lengths."""
    assert left.num_blocks == right.num_blocks, f"{left.num_blocks} blocks onto {right.num_blocks}"
    others = iter(right.runs)
    start = stop = 0
    for first, end in left.runs:
        position = first
        while position < end:
            if start == stop:
                start, stop = next(others)
            length = min(end - position, stop - start)
            yield (position, position + length), (start, start + length)
            position += length
            start += length


def stage_blocks(
    staging: torch.Tensor, components: tuple[torch.Tensor, ...], num_blocks: int
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Cut staging memory into one `[num_blocks, page_size_bytes]` area a component; and the bytes they take.

    The areas follow each other without gaps, so that they travel in one call.
    """
    areas: list[torch.Tensor] = []
    cursor = 0
    for component in components:
        page_size_bytes = component.shape[1]
        end = cursor + num_blocks * page_size_bytes
        areas.append(staging[cursor:end].view(num_blocks, page_size_bytes))
        cursor = end
    return tuple(areas), cursor
