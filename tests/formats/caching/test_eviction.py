"""What is evicted is what a reader with full knowledge of the future would evict."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st

from shardprep.formats.storage.cache_folder import (
    CachedFile,
    LivingReader,
    eviction_order,
    identity_of,
    nearest,
)

NAMES = [f"{number:016x}".ljust(64, "0") for number in range(1, 6)]

sequences = st.lists(st.sampled_from(NAMES), min_size=1, max_size=12)


def downloads(uses: Sequence[str], room: int, distances: Callable[[int], dict[int, float]]) -> int:
    """How many files are downloaded if ``room`` files of one size fit; the future is told at each use."""
    there: dict[str, int] = {}
    count = 0
    for at, name in enumerate(uses):
        if name not in there:
            count += 1
            files = [CachedFile(each, Path(each), 1, used) for each, used in there.items()]
            for file in eviction_order(files, distances(at))[: max(0, len(there) + 1 - room)]:
                del there[file.name]
        there[name] = at
    return count


def fewest(uses: Sequence[str], room: int) -> int:
    """The fewest downloads of all choices, tried one by one."""

    @cache
    def rest(at: int, there: frozenset[str]) -> int:
        if at == len(uses):
            return 0
        name = uses[at]
        if name in there:
            return rest(at + 1, there)
        if len(there) < room:
            return 1 + rest(at + 1, there | {name})
        return 1 + min(rest(at + 1, there - {gone} | {name}) for gone in there)

    return rest(0, frozenset())


@given(sequences, st.integers(1, 4))
def test_with_the_future_told_no_choice_downloads_less(uses: list[str], room: int) -> None:
    told = np.array([identity_of(name) for name in uses], np.uint64)

    def known(at: int) -> dict[int, float]:
        return nearest([LivingReader(1, at, told)])

    assert downloads(uses, room, known) == fewest(uses, room) <= downloads(uses, room, lambda at: {})
