"""Random streams depend only on their key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.rng import Purpose, RecordRandom, keyed_bits, record_rng

words = st.integers(0, (1 << 64) - 1)


def test_a_stream_is_the_same_as_ever():
    bits = keyed_bits(Purpose.AUGMENTATION, seed=3, epoch=4, item=7)

    assert bits.random_raw(2).tolist() == [3194593376199455426, 9954605077941752896]


@given(seed=words, keys=st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_a_reused_generator_gives_the_numbers_of_a_new_one(seed, keys):
    reused = RecordRandom(seed)

    for epoch, record in keys:
        fresh = record_rng(seed, epoch, record)
        again = reused(epoch, record)
        assert again.random() == fresh.random()
        assert again.integers(1 << 31, dtype=np.uint32) == fresh.integers(1 << 31, dtype=np.uint32)
        assert again.standard_normal() == fresh.standard_normal()


def test_seed_epoch_record_and_purpose_each_give_another_stream():
    streams = [
        keyed_bits(purpose, seed=seed, epoch=epoch, item=item).random_raw()
        for purpose in Purpose
        for seed in range(3)
        for epoch in range(3)
        for item in range(3)
    ]

    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
def test_a_key_that_does_not_fit_is_refused(seed, epoch):
    with pytest.raises(UsageError, match="must be between"):
        record_rng(seed, epoch, 0)
