"""Pickled values in one piece of memory with their arrays beside the pickle, and aligned memory.

Each array is copied once in each direction. A piece consists of the number of buffers, the pickle's size and
each buffer's start and size, as 8 bytes each; the pickle; and the buffers, each aligned to 64 bytes. Only for
a process and its own children.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.runtime.processes import group_limits, lines_of, refers_to_main

Memory = npt.NDArray[np.uint8]

ALIGNMENT = 64  # bytes; TensorFlow needs it to take an array without a copy, and aborts on less
MEMINFO = Path("/proc/meminfo")
MAX_IDLE_PIECES = 8  # pieces of memory kept while no array uses them
MIN_RECYCLED_BYTES = 1 << 20  # malloc recycles smaller pieces itself


def round_up(size: int, unit: int = ALIGNMENT) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit


def allocate_aligned(size: int) -> Memory:
    """Return new, uninitialised bytes aligned to ALIGNMENT."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def aligned_copy(memory: Memory) -> Memory:
    """Return a copy of bytes in :func:`allocate_aligned` memory."""
    fresh = allocate_aligned(memory.size)
    fresh[:] = memory
    return fresh


def is_usable(memory: Memory) -> bool:
    """Whether arrays may be views of ``memory``: it is aligned and writable."""
    return bool(memory.ctypes.data % ALIGNMENT == 0 and memory.flags.writeable)


def available_memory() -> int | None:
    """Return the minimum of MemAvailable and this process's cgroup limits in bytes; None if unknown.

    A cgroup's limit counts in full, because most of its use is page cache, which the kernel frees.
    """
    limits = [int(line.split()[1]) << 10 for line in lines_of(MEMINFO) if line.startswith("MemAvailable:")]
    for words in group_limits("memory", ["memory.limit_in_bytes"], "memory.max"):
        limits += [int(word) for word in words if word.isdecimal()]  # not "max"
    return min(limits, default=None)


class MemoryPool:
    """Allocates aligned memory, reusing an idle piece of the same size; call it with the size.

    Page faults make new memory as slow as filling it. A piece is idle once every view of it is dropped, in
    any thread. Only one thread may allocate.
    """

    def __init__(self) -> None:
        self._idle: deque[Memory] = deque(maxlen=MAX_IDLE_PIECES)

    def __call__(self, size: int) -> Memory:
        if size < MIN_RECYCLED_BYTES:
            return allocate_aligned(size)
        for _ in range(len(self._idle)):
            owner = self._idle.popleft()
            if owner.size == size:
                break
            self._idle.append(owner)
        else:
            owner = allocate_aligned(size)
        view = np.frombuffer(owner.data, np.uint8)  # views keep this array alive, not its owner
        weakref.finalize(view, self._idle.append, owner).atexit = False
        return view


Buffers = list[pickle.PickleBuffer]

PICKLING_ADVICE = (
    "define it at the top level of a module, or pip install 'shardprep[cloudpickle]', and let it refer only to "
    "what can be pickled"
)


def dumps(value: object) -> bytes:
    """Pickle a value. Raises whatever its class raises if it cannot be pickled."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


class Pickle(NamedTuple):
    """A pickle, the memory of its arrays beside it, and how it refers to functions and classes.

    They are ``by_name``, or part of the pickle. If it ``needs_main``, unpickling may import the main module.
    """

    data: bytes
    buffers: Buffers
    by_name: bool
    needs_main: bool


def pickle_for_process(value: object, *, out_of_band: bool = False, with_main: bool = False) -> Pickle:
    """Pickle a value for another process; ``out_of_band`` keeps the memory of arrays out of the pickle.

    With cloudpickle, lambdas, closures and definitions of the main module are pickled by value, because other
    processes may not have that module; if that fails, by name for a process ``with_main``, which imports it.
    In a child that multiprocessing spawned, cloudpickle, too, refers to that module by name. Raises like
    :func:`dumps`.
    """
    in_child = sys.modules["__main__"].__name__ == "__mp_main__"

    def pickle_by(dumps: Callable[..., bytes]) -> Pickle:
        buffers: Buffers = []
        keep = buffers.append if out_of_band else None
        data = dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
        by_name = dumps is dumps_by_name
        return Pickle(bytes(data), buffers, by_name, (by_name or in_child) and refers_to_main(data))

    tensor = getattr(sys.modules.get("torch"), "Tensor", None) if out_of_band else None
    dumps_by_name = _make_dumps(pickle.Pickler, tensor, _reduce_tensor) if tensor else pickle.dumps
    try:
        by_name = pickle_by(dumps_by_name)
    except Exception:
        if (dumps_by_value := cloudpickle_dumps(once=out_of_band)) is None:
            raise
        return pickle_by(dumps_by_value)
    if by_name.needs_main and not in_child and (dumps_by_value := cloudpickle_dumps(once=out_of_band)):
        try:
            return pickle_by(dumps_by_value)
        except Exception:  # of something that only its own module can make
            if not with_main:
                raise
    return by_name


def cloudpickle_dumps(*, once: bool = False) -> Callable[..., bytes] | None:
    """Return cloudpickle's ``dumps``, with the file names of code; None if it is not installed.

    ``once``: it pickles each class by value only once, until :data:`class_pickles` are dropped.
    """
    try:
        import cloudpickle  # type: ignore[import-untyped]  # here: it is optional, and takes start-up time
    except ImportError:
        return None
    base = _make_class_pickler(cloudpickle.Pickler) if once else cloudpickle.Pickler
    return _make_dumps(base, CodeType, _reduce_code)


class_pickles: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()  # of the latest engine


@cache
def _make_class_pickler(base: Any) -> Any:
    """Return a pickler that keeps the pickles of classes by value; each takes half a millisecond."""

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            is_class = isinstance(value, type)
            if is_class and (data := class_pickles.get(value)):
                return _class_of, (data,)
            reduced = super().reducer_override(value)
            if not is_class or reduced is NotImplemented:  # by name
                return reduced
            class_pickles[value] = data = _make_dumps(base, CodeType, _reduce_code)(value)
            return _class_of, (data,)

    return Pickler


@lru_cache
def _class_of(data: bytes) -> Any:
    return loads(data)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    import cloudpickle

    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)  # without the file since 3.1.2
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in arguments)


def _reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """Reduce a plain tensor of PyTorch to its array; PyTorch itself copies it in 0.2 ms."""
    with suppress(RuntimeError, TypeError):  # not a plain one: on a device, with gradients, sparse, bfloat16
        if tensor.is_contiguous() and not vars(tensor):
            return sys.modules["torch"].from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


@cache
def _make_dumps(base: Any, kind: type, reduce: Callable[[Any], Any]) -> Callable[..., bytes]:
    table = copyreg.dispatch_table if base is pickle.Pickler else base.dispatch_table
    pickler = type("Pickler", (base,), {"dispatch_table": ChainMap({kind: reduce}, table)})

    def dumps(value: object, **options: Any) -> bytes:
        file = io.BytesIO()
        pickler(file, **options).dump(value)
        return file.getvalue()

    return dumps


def loads(data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle a value. Never for data from a file or network: unpickling runs code that the data names."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301


_PAIR = struct.Struct("<QQ")  # of counts of the piece, or start and size of a buffer


@dataclass(eq=False, slots=True)
class PickledValue:
    """A pickled value of ``size`` bytes. Its arrays are not copied before :meth:`write`."""

    head: bytes
    stream: bytes
    buffers: list[tuple[int, memoryview]]
    size: int

    @classmethod
    def of(cls, value: object, *, copy: bool = False) -> PickledValue:
        """Pickle a value, which must not change until it is written unless ``copy`` copies its arrays.

        Raises whatever the value's class raises if it cannot be pickled.
        """
        stream, arrays, *_ = pickle_for_process(value, out_of_band=True)
        head = _PAIR.pack(len(arrays), len(stream))
        end = len(head) + _PAIR.size * len(arrays) + len(stream)
        buffers: list[tuple[int, memoryview]] = []
        for buffer in arrays:
            view, start = buffer.raw(), round_up(end)
            buffers.append((start, memoryview(bytes(view)) if copy else view))
            head += _PAIR.pack(start, view.nbytes)
            end = start + view.nbytes
        return cls(head, stream, buffers, end)

    def write(self, memory: Memory) -> None:
        """Write the value to the start of ``memory``."""
        texts = [(0, memoryview(self.head)), (len(self.head), memoryview(self.stream))]
        for start, piece in texts + self.buffers:
            memory.data[start : start + len(piece)] = piece


def unpickle(memory: Memory, *, copy: bool) -> Any:
    """Return the value that was written to ``memory``. Its arrays are writable.

    They are views of that memory, or copies if ``copy`` or if the memory is not usable for arrays.
    """
    count, length = _PAIR.unpack_from(memory.data)
    start = _PAIR.size * (1 + count)
    table, stream = memory.data[_PAIR.size : start], memory.data[start : start + length]
    pieces = [memory[at : at + size] for at, size in _PAIR.iter_unpack(table)]
    if pieces and (copy or not is_usable(memory)):
        pieces = list(map(aligned_copy, pieces))
    return loads(stream, pieces)
