"""Slots of shared memory: their layout, when a slot is free again, and that no reader sees it change."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.batches import pickling as memory, slots
from shardprep.loaders.batches.slots import SlotField, SlotLayout, SlotRing, SlotsHeld

DTYPES = st.sampled_from(["u1", "<i8", "<f4", "?", "<f8", "S3"])
FIELDS = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES), max_size=4)


def ring_of(count: int) -> SlotRing:
    return SlotRing(SlotLayout(4, (SlotField("a", (3,), np.int64), SlotField("b", (), np.uint8))), count)


def ignore_return() -> None:
    """The callback for returned slots; does nothing."""


@settings(deadline=None)
@given(rows=st.integers(1, 9), fields=FIELDS, spare=st.integers(0, 100), data=st.data())
def test_arrays_lie_apart_on_64_bytes_in_any_layout(
    rows: int, fields: list[tuple[list[int], str]], spare: int, data: st.DataObject
) -> None:
    layout = SlotLayout(rows, tuple(SlotField(str(i), *field) for i, field in enumerate(fields)), spare=spare)
    used = data.draw(st.integers(0, rows))
    whole = memory.aligned(layout.nbytes)
    arrays = layout.arrays(whole, used)
    parts = [*arrays.values(), layout.spare_bytes(whole, 0, used)]

    whole[:] = 0
    for array in parts:
        array.view(np.uint8)[...] = 1 if array.size else 0

    assert int(whole.sum()) == sum(array.nbytes for array in parts)
    assert all(array.ctypes.data % 64 == 0 for array in parts if array.size)
    assert all(len(array) == used for array in arrays.values())
    assert all(array.flags.c_contiguous and array.flags.writeable for array in parts)


def test_a_ring_starts_each_slot_on_a_page_and_shares_nothing_between_them() -> None:
    ring = ring_of(3)

    for slot in range(3):
        ring.memory(slot)[:] = slot

    assert [set(ring.memory(slot).tolist()) for slot in range(3)] == [{0}, {1}, {2}]
    assert all(ring.memory(slot).ctypes.data % 4096 == 0 for slot in range(3))


def test_a_slot_returns_when_the_last_view_of_its_arrays_is_dropped() -> None:
    ring, bell = ring_of(2), []
    arrays = ring.layout.arrays(ring.lend(1, lambda: bell.append("rung")), 4)

    row = arrays["a"][2:]
    arrays.clear()
    view = memoryview(row)
    del row
    assert not ring.returned
    del view

    assert list(ring.returned) == [1]
    assert bell == ["rung"]


def test_a_slot_returns_from_a_reference_cycle_and_from_another_thread() -> None:
    ring = ring_of(2)
    cycle: list[object] = [ring.lend(0, ignore_return)]
    cycle.append(cycle)
    held = [ring.lend(1, ignore_return)]

    del cycle
    gc.collect()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()

    assert sorted(ring.returned) == [0, 1]


def test_arrays_stay_readable_after_the_ring_is_closed_and_gone() -> None:
    ring = ring_of(2)
    held = ring.layout.arrays(ring.lend(0, ignore_return), 4)["a"]
    held[:] = 7

    ring.close()
    ring.close()
    del ring
    gc.collect()

    assert (held == 7).all()


def test_holding_more_than_the_ring_allows_gives_one_warning() -> None:
    ring = ring_of(4)
    held = [ring.lend(slot, ignore_return) for slot in range(2) if ring.may_keep(slot)]

    with pytest.warns(SlotsHeld, match="raise `slots`"):
        assert not ring.may_keep(2)
    assert not ring.may_keep(3)

    assert ring.copied == 2
    assert len(held) == 2


def test_copied_arrays_lie_in_memory_of_their_own() -> None:
    ring = ring_of(3)
    ring.memory(2)[:] = 7
    copies = ring.layout.copied_arrays(ring.memory(2), ring.layout.rows)
    ring.memory(2)[:] = 9

    assert all((copy.view("u1") == 7).all() for copy in copies.values())
    assert all(copy.ctypes.data % 64 == 0 for copy in copies.values())


def test_slots_are_lent_again_once_held_ones_are_dropped() -> None:
    ring = ring_of(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlotsHeld)
        for _ in range(5):
            held = ring.lend(0, ignore_return)
            assert ring.may_keep(0)
            del held

    assert ring.copied == 0


def test_the_memory_is_taken_at_the_start_not_as_it_is_written() -> None:
    ring = ring_of(8)

    taken = os.fstat(ring._file.fileno()).st_blocks * 512

    assert taken >= 8 * ring.layout.nbytes


def test_more_than_the_available_memory_is_an_error_that_says_what_to_change() -> None:
    layout = SlotLayout(256, (SlotField("pixels", (1 << 30,), np.uint8),))

    with pytest.raises(OperationError, match=r"8 slots of .* MiB are available; .*batch_size .*fewer slots"):
        SlotRing(layout, 8)


def test_memory_that_the_system_refuses_is_the_same_error(tmp_path: Path) -> None:
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, signal, sys\n"
        "from shardprep.formats.errors import OperationError\n"
        "from shardprep.loaders.batches.slots import SlotField, SlotLayout, SlotRing\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try:\n    SlotRing(SlotLayout(4, (SlotField('a', (1 << 20,), 'u1'),)), 4)\n"
        "except OperationError as error:\n    sys.exit(7 if 'batch_size' in str(error) else 8)\n"
    )

    assert subprocess.run([sys.executable, script], check=False).returncode == 7


def test_without_memfd_a_file_without_a_name_serves_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    ring = ring_of(2)
    ring.memory(1)[:] = 5

    assert (ring.memory(1) == 5).all()
    assert list(tmp_path.iterdir()) == []


def test_a_field_of_objects_or_two_of_one_name_or_no_rows_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="objects"):
        SlotField("a", (), object)
    with pytest.raises(UsageError, match="same name"):
        SlotLayout(1, (SlotField("a", (), "u1"), SlotField("a", (), "i8")))
    with pytest.raises(UsageError, match="0 rows"):
        SlotLayout(0, ())


def test_the_least_limit_of_all_control_groups_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inner = tmp_path / "job" / "task"
    inner.mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("1048576\n")
    (inner / "memory.max").write_text("max\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/job/task\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)

    assert list(memory._group_limits(str(own))) == [1048576]
    assert slots.available() is not None
