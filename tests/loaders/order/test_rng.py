"""Random streams depend only on their key."""

from __future__ import annotations

from shardprep.loaders.order.rng import Purpose, keyed_bits


def test_a_stream_is_the_same_as_ever():
    bits = keyed_bits(Purpose.AUGMENTATION, seed=3, epoch=4, item=7)

    assert bits.random_raw(2).tolist() == [3194593376199455426, 9954605077941752896]
