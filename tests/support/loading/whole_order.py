"""The order of an epoch as it was first defined: computed whole, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.order.rng import Purpose, keyed_bits

Records = npt.NDArray[np.int64]


def whole_order(shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int) -> Records:
    """Return every record number of the dataset once, in the order of this epoch."""
    records = sum(shard_counts)
    if shuffle is None:
        return np.arange(records, dtype=np.int64)
    window = shuffle.window_of(records)
    order = displaced(records, window=window, bits=keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch))
    if window == records:
        return order
    bits = keyed_bits(Purpose.SHARD_ORDER, seed=seed, epoch=epoch)
    shards = displaced(len(shard_counts), window=len(shard_counts), bits=bits)
    stream: Records = _shard_stream(shard_counts, shards)[order]
    return stream


def _shard_stream(shard_counts: Sequence[int], shards: npt.NDArray[np.int64]) -> Records:
    """The record numbers of all shards one after the other, in this order."""
    counts = np.asarray(shard_counts, np.int64)
    first_records = np.cumsum(counts) - counts
    places = np.cumsum(counts[shards]) - counts[shards]
    stream = np.repeat(first_records[shards] - places, counts[shards])
    stream += np.arange(len(stream), dtype=np.int64)
    return stream


def displaced(count: int, *, window: int, bits: np.random.Philox) -> Records:
    """Return 0 .. count - 1 ordered by i + window * u, with u uniform in [0, 1) for each i.

    One 64-bit key per record holds that sum as a fixed-point number in the high bits, and i in the low bits,
    which breaks ties and is the result. A window of ``count`` orders by u alone.
    """
    index_bits = count.bit_length()
    positions = np.arange(count, dtype=np.uint64)
    keys = bits.random_raw(count)
    if window < count:
        fraction_bits = min(32, 63 - 2 * index_bits)
        keys >>= np.uint64(32)
        keys *= np.uint64(window)
        keys >>= np.uint64(32 - fraction_bits)
        keys += positions << np.uint64(fraction_bits)
    keys <<= np.uint64(index_bits)
    keys |= positions
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.view(np.int64)
