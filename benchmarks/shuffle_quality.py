"""How well shuffles mix, by the meter of Loader.shuffle_quality(), over the real samplers of other loaders.

    pip install torch webdataset tensorpack==0.11   # a loader that is not installed is left out
    ...                                             # and ffcv, as peer_ffcv.py says
    python benchmarks/shuffle_quality.py

Records are numbers; none is read. "sorted" are classes one after the other, as in the official tars or in a
folder of classes; "mixed" is one fixed permutation, as prep convert stores them. Batches of 256.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from measuring.conditions import conditions

from shardprep import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.epoch import EpochPlan, Shuffle
from shardprep.loaders.order.quality import quality_of_batches

BATCH = 256
SHARD = 2_000
FFCV_PAGE = 8 << 20  # bytes, FFCV's default
FFCV_RECORD = 110_000  # bytes, ImageNet's mean

Orders = Callable[[int], Iterable[int]]  # from the number of records to the order of the next epoch


def ours(shuffle: Shuffle | None) -> Orders:
    epochs = iter(range(2))
    plan = EpochPlan("", (), shuffle, seed=0, batch_size=BATCH, rank=0, world_size=1, drop_last=False)
    return lambda records: (
        replace(plan, shard_counts=(SHARD,) * (records // SHARD)).order(next(epochs))[:].tolist()
    )


def torch_random() -> Orders:
    from torch.utils.data import RandomSampler

    return lambda records: iter(RandomSampler(range(records)))


def torch_distributed() -> Orders:
    from torch.utils.data import DistributedSampler

    epochs = iter(range(2))

    def order(records: int) -> Iterator[int]:
        sampler: Any = DistributedSampler(range(records), num_replicas=1, rank=0)  # type: ignore[arg-type]
        sampler.set_epoch(next(epochs))
        return iter(sampler)

    return order


def tensorpack_local(buffer: int) -> Orders:
    from tensorpack.dataflow import DataFromGenerator, LocallyShuffleData

    def order(records: int) -> Iterator[int]:
        flow = LocallyShuffleData(DataFromGenerator(lambda: ([n] for n in range(records))), buffer)
        flow.reset_state()
        return (number for (number,) in flow)

    return order


def webdataset_shards(buffer: int) -> Orders:
    """Its usual recipe: shards in random order, then a buffer of samples."""
    from webdataset.filters import shuffle

    rng = random.Random(0)

    def order(records: int) -> Iterator[int]:
        shards = list(range(records // SHARD))
        rng.shuffle(shards)
        stream = (shard * SHARD + at for shard in shards for at in range(SHARD))
        return iter(shuffle(buffer, initial=buffer)(stream))

    return order


def tf_data(buffer: int) -> Orders:
    import tensorflow as tf

    def order(records: int) -> Iterator[int]:
        return iter(tf.data.Dataset.range(records).shuffle(buffer).as_numpy_iterator())

    return order


def ffcv_quasi_random() -> Orders:
    """Its own sampler, in front of pages of its default size that are filled with records as ImageNet's."""
    from ffcv.traversal_order import QuasiRandom

    epochs = iter(range(2))

    def order(records: int) -> Iterator[int]:
        page = FFCV_PAGE // FFCV_RECORD
        pages = {
            number: set(range(number * page, min(records, (number + 1) * page)))
            for number in range(-(-records // page))
        }
        loader = SimpleNamespace(
            indices=np.arange(records),
            seed=0,
            distributed=False,
            batch_size=BATCH,
            memory_manager=SimpleNamespace(
                page_to_samples={np.uint64(number): held for number, held in pages.items()}
            ),
        )
        return iter(QuasiRandom(loader).sample_order(next(epochs)))

    return order


CONTENDERS: dict[str, tuple[str, Callable[[], Orders]]] = {
    "stored order": ("", lambda: ours(None)),
    "LocalShuffle(10,000)": ("", lambda: ours(LocalShuffle(10_000))),
    "LocalShuffle(50,000)": ("", lambda: ours(LocalShuffle(50_000))),
    "GlobalShuffle()": ("", lambda: ours(GlobalShuffle())),
    "torch RandomSampler": ("torch", torch_random),
    "torch DistributedSampler": ("torch", torch_distributed),
    "tensorpack LocallyShuffleData(10,000)": ("tensorpack", lambda: tensorpack_local(10_000)),
    "webdataset shards + shuffle(10,000)": ("webdataset", lambda: webdataset_shards(10_000)),
    "tf.data shuffle(10,000)": ("tensorflow", lambda: tf_data(10_000)),
    "ffcv QuasiRandom, 512 pages": ("ffcv", ffcv_quasi_random),
}


def measure(name: str, labels: np.ndarray, orders: Orders) -> str:
    records = len(labels)
    epochs = [np.fromiter(islice(orders(records), records), np.int64) for _ in range(2)]
    first, second = (order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) for order in epochs)
    found = quality_of_batches(first, second, labels, shard_records=SHARD)
    apart = found.stored_neighbours
    assert apart is not None
    return (
        f"{name:40}{found.classes.found:>9.1f}{found.classes.expected:>9.1f}{found.fewest:>8}{found.distance:>9.1f}"
        f"{apart.found / apart.expected:>10.1%}{found.meet_again.found / found.meet_again.expected:>12.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=1_280_000)
    parser.add_argument("--classes", type=int, default=1_000)
    chosen = parser.parse_args()
    by_class = np.arange(chosen.records) * chosen.classes // chosen.records
    packages = {package: package for package, _ in CONTENDERS.values() if package and find_spec(package)}
    if packages.pop("tensorflow", None):
        packages["tensorflow"] = "tensorflow-cpu"
    print(conditions("numpy", *packages.values()))
    for title, labels in (("sorted", by_class), ("mixed", np.random.default_rng(0).permutation(by_class))):
        print(f"\n{title:40}{'classes':>9}{'of':>9}{'fewest':>8}{'z':>9}{'spread':>10}{'meet again':>12}")
        for name, (package, make) in CONTENDERS.items():
            if not package or find_spec(package):
                print(measure(name, labels, make()), flush=True)
    print(
        "\nspread: mean distance of stored neighbours, of a full shuffle's; meet again: times as often as by chance"
    )


if __name__ == "__main__":
    main()
