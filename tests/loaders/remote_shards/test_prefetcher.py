"""Files are downloaded in the order of their use."""

import threading
from contextlib import closing
from typing import Any

from shardprep.formats.shards.files import FileEntry
from shardprep.loaders.loader.ahead import Prefetcher
from support.waiting import until


class FullCache:
    """A cache without room, which says so of one file at a time."""

    def __init__(self, count: int) -> None:
        self.files = [FileEntry(str(number), 1, f"sha256:{number:064x}", 1) for number in range(count)]
        self.asked: list[int] = []
        self.answers = [threading.Event() for _ in self.files]

    def prefetch(self, entry: FileEntry, *, evict: bool) -> bool:
        number = int(entry.name)
        self.asked.append(number)
        self.answers[number].wait(60)
        return False


def test_the_first_of_the_files_that_had_no_room_is_tried_first_after_others_were_used() -> None:
    cache: Any = FullCache(6)
    with closing(Prefetcher(cache, ahead=1, at_once=6)) as prefetcher:
        prefetcher.follow(cache.files)
        until(lambda: len(cache.asked) == 6)
        for number in (0, 3, 1, 5, 4, 2):
            cache.answers[number].set()
            until(lambda number=number: number in prefetcher._put_back)  # type: ignore[misc]
        cache.asked.clear()

        prefetcher.skip_to(2, 2)

        until(lambda: cache.asked, timeout_s=10)
        assert set(cache.asked) == {2}
