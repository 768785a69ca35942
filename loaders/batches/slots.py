"""Slots: pieces of shared memory of equal size, each for one batch that workers fill."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.files import memory_file
from shardprep.formats.runtime.owners import Descriptor, cached_property
from shardprep.loaders.batches.pickling import Memory, PickledValue, aligned_copy, available_memory, round_up
from shardprep.loaders.transforms.contract import ArraySpec

Arrays = dict[str, npt.NDArray[Any]]

RESERVED_SLOTS = 2  # slots that the consumer may not keep: one being filled, and the next
INPUTS = "(inputs)"  # name of a slot's input area among a worker's arrays
MIN_SLOTS = 3  # a loop holds one batch while it asks for the next, and a third is being filled


class SlotsHeld(UserWarning):
    """The consumer holds so many batches that further ones are copied, which takes time and memory."""


@dataclass(frozen=True)
class SlotLayout:
    """A slot of ``rows`` rows: an array per field, aligned to 64 bytes, then spare bytes and inputs.

    ``spare`` bytes per row take results of varying size, which otherwise go through the worker's socket, six
    times as slowly; ``inputs`` bytes take values for the workers besides their items. A ``sparse`` slot uses
    memory only where it has been written.
    """

    rows: int
    fields: tuple[ArraySpec, ...]
    spare: int = 0
    inputs: int = 0
    sparse: bool = False

    def __post_init__(self) -> None:
        if len({field.name for field in self.fields}) < len(self.fields):
            raise UsageError("two fields of a slot have the same name")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each field and, last, of the spare bytes."""
        ends = [0]
        for field in self.fields:
            ends.append(round_up(ends[-1] + self.rows * field.nbytes))
        return tuple(ends)

    @property
    def nbytes(self) -> int:
        """Size of a slot: one or more whole pages."""
        return round_up(max(1, self._inputs_start + self.inputs), mmap.PAGESIZE)

    def arrays(self, memory: Memory, rows: int, *, copy: bool = False) -> Arrays:
        """Return ``rows`` rows of each field, as views of a slot's memory or, if ``copy``, copies."""
        if copy:
            memory = aligned_copy(memory[: self.offsets[-1]])
        return {
            field.name: memory[start : start + rows * field.nbytes]
            .view(field.dtype)
            .reshape(rows, *field.shape)
            for field, start in zip(self.fields, self.offsets, strict=False)
        }

    @property
    def _inputs_start(self) -> int:
        return round_up(self.offsets[-1] + self.rows * self.spare)

    def input_area(self, memory: Memory) -> Memory:
        return memory[self._inputs_start : self._inputs_start + self.inputs]

    def spare_bytes(self, memory: Memory, first: int, count: int) -> Memory:
        """Return the spare bytes of ``count`` rows, starting at ``first``."""
        start = self.offsets[-1]
        return memory[start + first * self.spare : start + (first + count) * self.spare]


class SlotRing:
    """``slots`` slots in one piece of anonymous shared memory, mapped in full, or, if sparse, on use.

    Nothing is left behind, however its processes end. Can be pickled only while starting a child process. The
    memory is freed once :meth:`close` was called *and* the last array on it is dropped. Raises OperationError
    if there is too little memory.
    """

    def __init__(self, layout: SlotLayout, slots: int, inherited: Any = None) -> None:
        """``inherited`` is multiprocessing's handle of the memory, in a child."""
        fd = _allocate(layout, slots) if inherited is None else inherited.detach()
        self.layout = layout
        self.slots = slots
        self.copied = 0
        self._lent: dict[int, weakref.ref[Memory]] = {}
        self._held: list[weakref.ref[Memory]] = []
        self._file = Descriptor(fd)
        # without MAP_POPULATE, with page faults in the workers, a ring runs at 80%
        flags = mmap.MAP_SHARED | (0 if layout.sparse else mmap.MAP_POPULATE)
        try:
            self._map = memoryview(mmap.mmap(fd, slots * layout.nbytes, flags=flags))
        except OSError as error:
            raise _memory_error(layout, slots, str(error.strerror)) from error
        _rings.add(self)

    def memory(self, slot: int) -> Memory:
        """Return a slot's bytes, page-aligned, without lending the slot."""
        size = self.layout.nbytes
        return np.frombuffer(self._map, np.uint8, count=size, offset=slot * size)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the slots take; for a sparse layout, those written so far."""
        if not self.layout.sparse:
            return self.slots * self.layout.nbytes
        return os.fstat(self._file.fileno()).st_blocks * 512 if self._map else 0

    def load(self, slot: int, inputs: Iterable[tuple[int, PickledValue]]) -> None:
        """Write values to the slot's input area, each at its offset."""
        room = self.layout.input_area(self.memory(slot))
        for start, piece in inputs:
            piece.write(room[start : start + piece.size])

    def lend(self, slot: int, watch: Callable[[Memory], weakref.ref[Memory]]) -> Memory:
        """Return a slot's bytes. Once they and all views are dropped, `collect_returned()` has the slot.

        ``watch`` makes the reference that wakes whoever waits for that.
        """
        memory = self.memory(slot)
        self._lent[slot] = watch(memory)
        return memory

    def collect_returned(self) -> list[int]:
        """Return the lent slots whose memory was dropped since the last call; in the thread that lends."""
        slots = [slot for slot, memory in self._lent.items() if memory() is None]
        for slot in slots:
            del self._lent[slot]
        return slots

    @property
    def most_held(self) -> int:
        """Number of slots that the consumer may keep at the same time."""
        return max(self.slots - RESERVED_SLOTS, MIN_SLOTS - 1)

    def may_keep(self, memory: Memory) -> bool:
        """Whether the consumer may keep a lent slot's memory; otherwise its batch must be copied."""
        self._held = [memory for memory in self._held if memory() is not None]
        if len(self._held) < self.most_held:
            self._held.append(weakref.ref(memory))
            return True
        if not (self.copied or self.layout.sparse):
            warnings.warn(
                f"{len(self._held)} batches are held, the most that {self.slots} slots allow, so further "
                "batches are copied until some are dropped. To hold more, raise `slots`.",
                SlotsHeld,
                stacklevel=2,
            )
        self.copied += 1
        return False

    def close(self) -> None:
        """Release the memory; arrays on it stay valid until they are dropped. Idempotent."""
        self._map = memoryview(b"")
        self._file.close()
        self._lent.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layout, self.slots, reduction.DupFd(self._file.fileno()))


_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()


def _stop_watching() -> None:
    """In a forked copy of this process, wake nobody: the descriptor may be that of another file."""
    for ring in _rings:
        ring._lent.clear()


os.register_at_fork(after_in_child=_stop_watching)


def _allocate(layout: SlotLayout, slots: int) -> int:
    need, free = slots * layout.nbytes, available_memory()
    if not layout.sparse and free is not None and need > free:
        raise _memory_error(layout, slots, f"{free / 2**20:,.0f} MiB are available")
    fd = memory_file()
    try:
        if layout.sparse:
            os.truncate(fd, need)
        else:
            os.posix_fallocate(fd, 0, need)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            why = "ulimit -f allows less" if error.errno == errno.EFBIG else str(error.strerror)
            raise _memory_error(layout, slots, why) from error
        raise
    return fd


def _memory_error(layout: SlotLayout, slots: int, why: str) -> OperationError:
    if layout.sparse:
        return OperationError(
            f"cannot reserve {slots * layout.nbytes / 2**30:,.0f} GiB of addresses to share with worker processes: "
            f"{why}. Addresses take memory only once written to; raise the limits (`ulimit -v unlimited -f "
            "unlimited`), or use threads"
        )
    return OperationError(
        f"{slots} slots of {layout.nbytes / 2**20:,.1f} MiB need {slots * layout.nbytes / 2**20:,.0f} MiB of "
        f"memory, but {why}; choose a smaller batch_size ({layout.rows}) or fewer slots ({slots})"
    )


Kind = Literal["array", "tuple", "list", "dict"]

NUMBERS = "biufc"  # dtype kinds for which frameworks have tensors


@dataclass(frozen=True)
class RowForm:
    """The structure of a result (an array, or a tuple, list or dict of arrays or numbers), shapes and dtypes.

    Picklable; compares by value.
    """

    kind: Kind
    fields: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, result: Any) -> Self | None:
        """Return the form of a result; None unless it has only plain arrays and numbers."""
        kind, parts = _kind_and_parts(result)
        if not parts or any(array is None or array.dtype.kind not in NUMBERS for array in parts.values()):
            return None
        fields = (ArraySpec(name, array.shape, array.dtype.str) for name, array in parts.items())  # type: ignore[union-attr]
        return cls(kind, tuple(fields))

    def arrays_of(self, result: Any) -> list[npt.NDArray[Any]] | None:
        """Return the result's arrays; None if its form differs."""
        kind, parts = _kind_and_parts(result)
        if kind != self.kind or list(parts) != [field.name for field in self.fields]:
            return None
        arrays = list(parts.values())
        for array, field in zip(arrays, self.fields, strict=True):
            if array is None or array.shape != field.shape or array.dtype.str != field.dtype:
                return None
        return arrays  # type: ignore[return-value]

    def make_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Return a batch's arrays, given by field name, in this form, with a tuple for a list."""
        if self.kind == "dict":
            return {field.name: arrays[field.name] for field in self.fields}
        parts = tuple(arrays[field.name] for field in self.fields)
        return parts[0] if self.kind == "array" else parts

    def make_row(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Return one result's arrays in exactly this form, a list as a list."""
        row = self.make_batch(arrays)
        return list(row) if self.kind == "list" else row


def _kind_and_parts(result: Any) -> tuple[Kind, dict[str, npt.NDArray[Any] | None]]:
    if type(result) is dict and all(type(name) is str for name in result):
        return "dict", {name: array_of(part) for name, part in result.items()}
    if type(result) in (tuple, list):
        kind: Kind = "tuple" if type(result) is tuple else "list"
        return kind, {str(place): array_of(part) for place, part in enumerate(result)}
    return "array", {"": array_of(result)}


def array_of(part: Any) -> npt.NDArray[Any] | None:
    """Return an array unchanged and a number as a 0-d array; None for anything else."""
    if type(part) is np.ndarray:
        return part
    return np.asarray(part) if isinstance(part, bool | int | float | complex | np.generic) else None
