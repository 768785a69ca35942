"""Data exchanged by an engine and its workers: tasks, outcomes, errors and a table of worker states."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from threading import get_native_id
from time import thread_time
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.runtime.owners import Descriptor
from shardprep.formats.shards.read import Room
from shardprep.loaders.batches.pickling import (
    Memory,
    PickledValue,
    aligned_copy,
    allocate_aligned,
    dumps,
    is_usable,
    loads,
    round_up,
    unpickle,
)
from shardprep.loaders.batches.slots import INPUTS, Arrays, RowForm, SlotLayout, SlotRing
from shardprep.loaders.transforms.contract import ArraySpec

Items = npt.NDArray[Any]
Clock = npt.NDArray[np.float64]
Fill = Callable[[Items, Arrays, Room | None], Iterable[object]]
"""Function of (items, arrays, room) that fills one array row per item and yields each row's outcome.

``arrays`` are views of the items' rows, which must not be kept; INPUTS among them is the slot's input area,
if its layout has one. An outcome is None (the row is written), :class:`SkippedRow` (it is not), or a payload
of any size: bytes or an array, delivered as a memoryview or an aligned array, or any picklable object, with
aligned arrays. A PickledValue is an object that is already pickled. A payload is copied when it is yielded,
so its buffer may be reused.

``room(size)`` returns uint8 [size] in which to build the row's payload. If that same array is yielded for
the row, it is delivered as bytes, usually without a copy. It is valid until the row's outcome is yielded or
room is called again; memory that is not yielded is reused. In the calling process there is no room, and
bytes are kept as they are.
"""


@dataclass(frozen=True)
class SkippedRow:
    """The outcome of a row that was left out; its arrays have undefined contents."""

    reason: str


class RowTask(Protocol):
    """The work of an engine: picklable, opened once in each worker.

    An item is a numpy value of fixed size, at most 32 KiB. ``stages`` names the timed stages: the work adds
    seconds to ``clock[i]`` for ``stages[i]``. In workers, OpenCV and PyTorch compute in one thread if the
    work imports them when it is unpickled.
    """

    @property
    def item_dtype(self) -> np.dtype[Any]: ...

    @property
    def stages(self) -> tuple[str, ...]: ...

    def open(self, clock: Clock) -> AbstractContextManager[Fill]:
        """Prepare this process to do the work; leaving the context cleans up."""


# `at` counts from the start of the lease's spare bytes; beyond their end, it is in the message's bodies.
# `form` is that of an array, PICKLED, or empty for bytes.
_ENTRY = np.dtype([("row", "<u4"), ("at", "<u8"), ("size", "<u8"), ("form", "S40")])
PICKLED = b"pickled"


class OutcomeWriter:
    """Writes a lease's outcomes, ``rows`` so far; bodies that fit go to ``spare[:most]``."""

    def __init__(self, spare: Memory, most: int | None = None) -> None:
        self.rows = 0
        self._spare = spare[:most]
        self._used = 0
        self._room: Memory | None = None
        self._entries: list[tuple[int, int, int, bytes]] = []
        self._bodies: list[memoryview] = []
        self._end = spare.size

    def add(self, outcome: object) -> None:
        """Add the outcome of the next row."""
        if self._room is not None and outcome is self._room:
            self._add_entry(b"", self._room)
        elif outcome is not None:
            form, body = _encode(outcome)
            _write_body(body, memory := self.room(body.size))
            self._add_entry(form, memory)
        self._room = None
        self.rows += 1

    def room(self, size: int) -> Memory:
        """Return memory for the body of the next row's outcome; unused unless the outcome is this array."""
        end = self._used + size
        self._room = self._spare[self._used : end] if end <= self._spare.size else np.empty(size, np.uint8)
        return self._room

    def _add_entry(self, form: bytes, body: Memory) -> None:
        end = self._used + body.size
        if end <= self._spare.size:
            at, self._used = self._used, round_up(end)
        else:
            self._bodies.append(body.data)
            at, self._end = self._end, self._end + body.size
        self._entries.append((self.rows, at, body.size, form))

    @property
    def nbytes(self) -> int:
        """Bytes of the bodies so far."""
        return sum(size for _, _, size, _ in self._entries)

    def parts(self) -> tuple[bytes | memoryview, ...]:
        """Return the parts of a LeaseOutcomes' ``message``: number of entries, entries, bodies."""
        table = np.array(self._entries, _ENTRY).tobytes()
        return len(self._entries).to_bytes(4, "little"), table, *self._bodies


@dataclass(frozen=True)
class LeaseOutcomes:
    """The outcomes of one lease as they arrived, for ``count`` rows starting at ``first``."""

    first: int
    count: int
    message: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads, in the message and in the slot."""
        return int(self._entries["size"].sum(dtype=np.int64))

    @property
    def _entries(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.message, _ENTRY, int.from_bytes(self.message[:4], "little"), 4)

    def unpack(self, spare: Memory, *, copy: bool = False) -> Iterator[tuple[int, object]]:
        """Yield the rows of the batch that have a payload or were skipped, with their outcomes.

        Payloads lie in ``spare``, the writer's memory, or, if ``copy``, are copied.
        """
        if self.message[:4] == bytes(4):
            return
        entries = self._entries
        bodies = np.frombuffer(self.message, np.uint8, offset=4 + entries.nbytes)
        for row, at, size, form in entries.tolist():
            memory, start = (spare, at) if at < spare.size else (bodies, at - spare.size)
            yield self.first + row, _decode(form, memory[start : start + size], copy=copy)


def _write_body(body: Memory | PickledValue, memory: Memory) -> None:
    if isinstance(body, PickledValue):
        body.write(memory)
    else:
        memory[:] = body


def _encode(outcome: object) -> tuple[bytes, Memory | PickledValue]:
    if isinstance(outcome, bytes | bytearray | memoryview):
        return b"", np.frombuffer(outcome, np.uint8)
    # only its pickle has the mask of a masked array, or whatever else a subclass adds
    if type(outcome) is np.ndarray and len(form := _form(outcome)) <= _ENTRY["form"].itemsize:
        return form, np.ascontiguousarray(outcome).reshape(-1).view(np.uint8)
    return PICKLED, outcome if isinstance(outcome, PickledValue) else PickledValue.of(outcome)


def _decode(form: bytes, body: Memory, *, copy: bool) -> object:
    if form == PICKLED:
        return unpickle(body, copy=copy)
    if not form:
        return memoryview(body.tobytes()) if copy else body.data
    dtype, _, shape = form.decode().partition(":")
    memory = aligned_copy(body) if copy or not is_usable(body) else body
    return memory.view(dtype).reshape([int(side) for side in shape.split(",") if side])


def _form(array: npt.NDArray[Any]) -> bytes:
    """Return a form like ``<f4:3,224,224``; for arrays that need pickle, such as bfloat16, one too long."""
    dtype = array.dtype
    if dtype.hasobject or dtype.kind == "V" or not dtype.itemsize:
        return bytes(_ENTRY["form"].itemsize + 1)
    return f"{dtype.str}:{','.join(map(str, array.shape))}".encode()


ReportedError = TypeVar("ReportedError", bound=ShardprepError)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # a traceback line that is neither code nor a note


class WorkFailed(OperationError):
    """A worker raised an exception that cannot be pickled; a note contains its traceback."""


def pack_error(error: BaseException) -> bytes:
    """Pack the exception with its traceback as text, or only the text if it cannot be pickled.

    Exits and interruptions become text, too: raised again, they would silently end the training process.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    packed = b""
    with suppress(Exception):  # any class may raise anything here; `error` is what must be reported
        if isinstance(error, Exception):
            kind = type(error)
            if kind.__module__ == "__main__":  # cloudpickle's copy, to be pickled by name
                vars(sys.modules["__main__"]).setdefault(kind.__name__, kind)
            data = dumps(error)
            packed = data if isinstance(loads(data), Exception) else b""
    return dumps((packed, text))


def unpack_error(data: bytes, where: str) -> BaseException:
    """Return the exception, or a WorkFailed, with ``where`` and the worker's traceback in a note."""
    packed, text = loads(data)
    with suppress(Exception):
        error: Exception = loads(packed)
        error.add_note(f"In a worker, {where}:\n{text}")
        return error
    return make_error(WorkFailed, f"in a worker, {where}", text)


def make_error(kind: type[ReportedError], what: str, report: str) -> ReportedError:
    """Return an error with the last exception in a report, and the whole report as a note."""
    lines = report.splitlines() or [""]
    error = kind(f"{what}: {next(filter(_EXCEPTION.match, reversed(lines)), lines[-1])}")
    error.add_note(report)
    return error


# Columns of an item: its row among the batch's rows, and the position of their form; the rows follow it.
ROW_COLUMNS = [("row", "<u4"), ("rows", "<u4"), ("form_at", "<u8"), ("form_size", "<u8")]


class ResultRows(NamedTuple):
    """Rows of results in an input area, after the pickle of their ``form`` (``size`` bytes ``at``)."""

    form: RowForm
    rows: int
    at: int
    size: int

    @property
    def end(self) -> int:
        """The offset at which the rows end in the input area."""
        return self._start + self._layout.nbytes

    @property
    def _start(self) -> int:
        return round_up(self.at + self.size)

    @property
    def _layout(self) -> SlotLayout:
        return SlotLayout(self.rows, self.form.fields)

    def arrays(self, inputs: Memory, *, copy: bool = False) -> Arrays:
        """Return the rows' arrays, as views or, if ``copy``, copies."""
        return self._layout.arrays(inputs[self._start :], self.rows, copy=copy)


class RowWriter:
    """Writes the results of a lease to rows in the ``inputs`` area of its slot."""

    def __init__(self, items: Items, inputs: Memory | None) -> None:
        self._form: RowForm | None = None
        if inputs is not None and len(items) and items[0]["form_size"]:
            at, size, rows = (int(items[0][name]) for name in ("form_at", "form_size", "rows"))
            form = self._form = unpickle(inputs[at : at + size], copy=True)
            self._arrays = list(ResultRows(form, rows, at, size).arrays(inputs).values())

    def write(self, result: Any, row: int) -> bool:
        """Write a result to this row of the batch. Return False if it does not have the rows' form."""
        parts = self._form.arrays_of(result) if self._form else None
        if parts is None:
            return False
        for array, part in zip(self._arrays, parts, strict=True):
            array[row] = part
        return True


IDLE = 0  # not the number of any lease

SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a CPU, and waiting for one


class StatusTable:
    """Shared columns with one cell per worker. Can be pickled only while starting a child process.

    The engine writes ``run``: a worker does not begin leases of other runs. The worker writes the rest: its
    current ``lease`` and ``row``, and seconds, which continue those of its predecessors: ``filling``,
    ``waiting``, the ``clock`` of each stage of the work, and ``cpu`` of a :class:`CpuClock` while filling.
    """

    def __init__(self, ring: SlotRing) -> None:
        columns = ring.layout.arrays(ring.memory(0), ring.layout.rows)
        self._ring = ring
        self.run: npt.NDArray[np.int64] = columns["run"]
        self.lease: npt.NDArray[np.int64] = columns["lease"]
        self.row: npt.NDArray[np.int64] = columns["row"]
        self.filling: npt.NDArray[np.float64] = columns["filling"]
        self.waiting: npt.NDArray[np.float64] = columns["waiting"]
        self.cpu: npt.NDArray[np.float64] = columns["cpu"]
        self.clock: npt.NDArray[np.float64] = columns["clock"]

    @classmethod
    def of(cls, workers: int, stages: int) -> Self:
        counters = [ArraySpec(name, (), "int64") for name in ("run", "lease", "row")]
        shapes = {"filling": (), "waiting": (), "cpu": (2,), "clock": (stages,)}
        clocks = [ArraySpec(name, shape, "float64") for name, shape in shapes.items()]
        return cls(SlotRing(SlotLayout(workers, (*counters, *clocks)), slots=1))

    def set_idle(self, worker: int) -> None:
        self.lease[worker] = IDLE

    def place(self, worker: int) -> tuple[int, int]:
        """The worker's current lease and row; the lease is IDLE between leases."""
        return int(self.lease[worker]), int(self.row[worker])

    def close(self) -> None:
        self._ring.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ring,)


class CpuClock:
    """Clock of the calling thread: seconds [on a CPU, runnable but not on one].

    The second value is 0 if the kernel does not tell. A reading takes a microsecond; a thread's first longer.
    """

    _number = -1
    _thread = 0

    def read(self) -> npt.NDArray[np.float64]:
        if (thread := get_native_id()) != self._thread:
            self._thread, self._number = thread, -1
            with suppress(OSError):  # as in a sandbox
                self._file = Descriptor(os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC))
                self._number = self._file.fileno()
        on_cpu = thread_time()  # schedstat's first field follows ticks, which are longer than many leases
        if self._number < 0:
            return np.array((on_cpu, 0.0))
        _, queued, _ = os.pread(self._number, 64, 0).split()
        return np.array((on_cpu, int(queued) * 1e-9))


@dataclass(frozen=True, eq=False)
class EngineBatch:
    """The ``number``-th batch of a run: its planned ``items`` and their outcomes.

    Each of ``arrays`` has one row per item, is writable, is aligned to 64 bytes and does not change while a
    view of it is held. ``skipped`` maps left-out rows to the reason, ``payloads`` maps rows to results that
    are not in ``arrays``: memoryviews and arrays that keep the same memory alive. Both are ordered by row.
    ``form`` describes the results if the workers wrote them to ``arrays``.
    """

    number: int
    items: Items
    arrays: Arrays
    payloads: dict[int, object]
    skipped: dict[int, str]
    payload_bytes: int = 0
    form: RowForm | None = None

    def result(self, row: int) -> Any:
        """Return the result of a row that was not left out."""
        if row in self.payloads or self.form is None:
            return self.payloads[row]
        return self.form.make_row({name: array[row, ...] for name, array in self.arrays.items()})


def fill_batch(
    fill: Fill,
    number: int,
    items: Items,
    *,
    layout: SlotLayout,
    describe_row: Callable[[int, int, Any], str],
    inputs: Iterable[tuple[int, PickledValue]] = (),
    rows: ResultRows | None = None,
) -> EngineBatch:
    """Fill a batch in new memory; ``describe_row(row, number, item)`` becomes a note of its exceptions."""
    size = layout.offsets[-1]
    arrays = layout.arrays(allocate_aligned(size), len(items)) if size else {}
    areas = dict(arrays)
    if rows:
        areas[INPUTS] = memory = allocate_aligned(rows.end)
        arrays |= rows.arrays(memory)
        for start, piece in inputs:
            piece.write(memory[start:])
    payloads: dict[int, object] = {}
    skipped: dict[int, str] = {}
    done = 0
    try:
        for _, outcome in zip(range(len(items)), fill(items, areas, None), strict=True):
            if isinstance(outcome, bytes):
                payloads[done] = memoryview(outcome)
            elif isinstance(outcome, SkippedRow):
                skipped[done] = outcome.reason
            elif outcome is not None:
                form, body = _encode(outcome)
                _write_body(body, memory := allocate_aligned(body.size))
                payloads[done] = _decode(form, memory, copy=False)
            done += 1
    except Exception as error:
        row = min(done, len(items) - 1)
        error.add_note(f"In the calling thread, {describe_row(row, number, items[row])}")
        raise
    return EngineBatch(number, items, arrays, payloads, skipped, form=rows and rows.form)
