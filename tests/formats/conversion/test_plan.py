"""The plan: a pure function of listing and options."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.conversion.plan import Plan, PlanOptions, plan
from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import permutation
from shardprep.formats.sources.source import ByteReader, Listing, entry_dtype

Entry = tuple[str, int, int]  # key, label, length
CLASSES = LabelSpace.of(["n1", "n2", "n3"])


class NoReader(ByteReader):
    """Planning reads no image."""

    def __exit__(self, *exc: object) -> None: ...

    def read(self, entry: np.void) -> bytes:
        raise SourceDamaged("a plan must not read")

    def where(self, entry: np.void) -> str:
        raise SourceDamaged("a plan must not read")


def listing(entries: Iterable[Entry], **change: Any) -> Listing:
    rows = [(key.encode(), b"", label, length, 0, 0) for key, label, length in entries]
    key_bytes = max((len(row[0]) for row in rows), default=1)
    made = Listing("train", "folders", np.array(rows, entry_dtype(key_bytes, 1)), CLASSES, NoReader())
    return replace(made, **change)


def planned(entries: Iterable[Entry], **options: Any) -> Plan:
    return plan(listing(entries), PlanOptions(**options))


ENTRIES = [(f"n{1 + i // 4}/{i:02}", i // 4, 100 + i) for i in range(12)]

entry_lists = st.lists(
    st.tuples(st.text("abc/é", min_size=1, max_size=6), st.integers(-1, 2), st.integers(0, 50)),
    unique_by=lambda entry: entry[0],
    min_size=1,
    max_size=40,
)
options = st.builds(
    PlanOptions,
    container=st.sampled_from(["lmdb", "hdf5"]),
    shard_size=st.integers(1, 300),
    order=st.sampled_from(["key", "shuffled"]),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(deadline=None)
@given(entry_lists, options)
def test_every_entry_is_in_one_shard_and_no_shard_is_too_large(
    entries: list[Entry], options: PlanOptions
) -> None:
    made = plan(listing(entries), options)

    assert sorted(made.order) == list(range(len(entries)))
    bounds = [(shard.first, shard.last) for shard in made.shards]
    assert [0, *(last for _, last in bounds)] == [*(first for first, _ in bounds), len(entries)]
    for shard in made.shards:
        lengths = made.entries_of(shard)["length"]
        assert (shard.extent.records, shard.extent.payload_bytes) == (len(lengths), lengths.sum())
        assert lengths.sum() <= options.shard_size or len(lengths) == 1
    for shard, following in zip(made.shards, made.shards[1:], strict=False):
        next_length = made.entries_of(following)["length"][0]
        assert shard.extent.payload_bytes + next_length > options.shard_size


def test_the_permutation_of_a_seed_never_changes() -> None:
    assert permutation(10, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(5, (1 << 64) - 1).tolist() == [0, 4, 2, 3, 1]


DIFFERENCES: dict[str, Plan] = {
    "container": planned(ENTRIES, container="hdf5"),
    "shard size": planned(ENTRIES, shard_size=500),
    "order": planned(ENTRIES, order="key"),
    "seed": planned(ENTRIES, seed=1),
    "policy": planned(ENTRIES, on_bad_image="skip"),
    "split": plan(listing(ENTRIES, split="val"), PlanOptions()),
    "classes": plan(listing(ENTRIES, labels=LabelSpace.of(["n1", "n2", "n4"])), PlanOptions()),
    "a key": planned([("n1/xx", 0, 100), *ENTRIES[1:]]),
    "a longer key": planned([("n1/000", 0, 100), *ENTRIES[1:]]),
    "a label": planned([("n1/00", 1, 100), *ENTRIES[1:]]),
    "a length": planned([("n1/00", 0, 101), *ENTRIES[1:]]),
    "one fewer": planned(ENTRIES[1:]),
    "one more": planned([*ENTRIES, ("n9/1", 2, 1)]),
}


def test_the_digest_differs_for_every_difference() -> None:
    digests = {made.digest for made in DIFFERENCES.values()} | {planned(ENTRIES).digest}

    assert len(digests) == len(DIFFERENCES) + 1


def test_an_empty_listing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no images of the split train"):
        planned([])


@pytest.mark.parametrize(
    "wrong",
    [
        {"container": "zip"},
        {"order": "none"},
        {"on_bad_image": "warn"},
        {"shard_size": 0},
        {"shard_size": (4 << 30) + 1},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        PlanOptions(**wrong)


ALL_OF_TRAIN = """
import re
import numpy as np
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.conversion.plan import PlanOptions, plan
from shardprep.formats.sources.source import Listing, entry_dtype

rows = np.zeros(1_281_167, entry_dtype(28, 0))
rows["label"] = np.arange(len(rows)) % 1000
rows["length"] = 50_000 + np.arange(len(rows)) % 120_000
for start in range(0, len(rows), 4096):
    some = rows[start : start + 4096]
    some["key"] = [b"n%08d/n%08d_%d" % (n % 1000, n % 1000, n) for n in range(start, start + len(some))]
made = plan(Listing("train", "", rows, LabelSpace(()), None), PlanOptions())
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]  # ru_maxrss counts the parent, too
print(len(made.shards), sum(shard.extent.records for shard in made.shards), peak)
"""


@pytest.mark.torture
def test_all_of_ilsvrc12_is_planned_in_200_megabytes() -> None:
    command = [sys.executable, "-c", ALL_OF_TRAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)

    shards, records, peak_kib = map(int, done.stdout.split())
    assert (shards, records) == (520, 1_281_167)
    assert peak_kib * 1024 < 200_000_000
