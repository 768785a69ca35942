"""The share of shard reads that download, by what a cache evicts: simulated over real orders of epochs.

    python benchmarks/cache_eviction.py [--shards 400] [--epochs 12]

No file is read. Shards have one size; each is used once an epoch, in the order in which a LocalShuffle begins
them. "known future" is what a Loader of a URL does: the cache's eviction_order(), told this epoch and the
next. A shard is downloaded when it is needed. The first epoch, which fills the cache, is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from measuring.conditions import conditions

from shardprep import LocalShuffle
from shardprep.formats.storage.cache_folder import CachedFile, eviction_order, identity_of
from shardprep.loaders.order.epoch import EpochPlan, shard_uses

ROOM = (0.25, 0.5, 0.75, 0.9)
RECORDS = 50  # of a shard: the order of shards does not depend on it

Evict = Callable[[Iterable[CachedFile], Sequence[int]], CachedFile]


def epochs_of(shards: int, epochs: int) -> list[list[int]]:
    """The shards in the order of each epoch."""
    plan = EpochPlan("", (RECORDS,) * shards, LocalShuffle(5 * RECORDS), 0, RECORDS, 0, 1, True)
    return [shard_uses(plan, epoch).shards.tolist() for epoch in range(epochs)]


def known_future(files: Iterable[CachedFile], future: Sequence[int]) -> CachedFile:
    distances: dict[int, float] = {}
    for distance, shard in enumerate(future):
        distances.setdefault(shard, distance)
    return eviction_order(files, distances)[0]


def least_recently_used(files: Iterable[CachedFile], future: Sequence[int]) -> CachedFile:
    return eviction_order(files, {})[0]


def downloads(orders: Sequence[Sequence[int]], room: int, evict: Evict) -> float:
    """The share of the uses after the first epoch for which a shard is downloaded."""
    cached: dict[int, CachedFile] = {}
    missed = uses = now = 0
    for epoch, order in enumerate(orders[:-1]):
        for place, shard in enumerate(order):
            now += 1
            if shard not in cached:
                missed += epoch > 0
                if len(cached) == room:
                    future = [*order[place:], *orders[epoch + 1]]
                    del cached[identity_of(evict(cached.values(), future).name)]
            cached[shard] = CachedFile(f"{shard:016x}{0:048x}", "", 1, now)
        uses += len(order) if epoch else 0
    return missed / uses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shards", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    orders = epochs_of(options.shards, options.epochs)
    print(conditions("numpy"))
    print("| room for | known future | least recently used |\n|---|---|---|")
    for share in ROOM:
        room = round(share * options.shards)
        rates = (downloads(orders, room, evict) for evict in (known_future, least_recently_used))
        print(f"| {share:.0%} | " + " | ".join(f"{rate:.0%}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
