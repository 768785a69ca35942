"""The pickled work that worker processes get at their start."""

from __future__ import annotations

import sys
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

from shardprep.formats.errors import UsageError
from shardprep.formats.processes.process_start import main_module
from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Inheritable
from shardprep.formats.system.positional import read_at
from shardprep.loaders.buffers.memory import anonymous_file
from shardprep.loaders.buffers.pickling import (
    INSTALL_CLOUDPICKLE,
    can_dump_by_value,
    dumps_by_value,
    dumps_noting_main,
    loads,
)
from shardprep.loaders.engine.protocol.task import RowTask

UNIMPORTABLE = "it is defined in a notebook or on standard input, which no other process imports"


class SentWork(Inheritable):
    """A pickle of the work in an anonymous file; itself picklable only to a child that is being started.

    It does not go through the pipe by which multiprocessing prepares a child: that has room for 64 KiB, and a
    start with more waits endlessly for a child that is stopped or has died. ``main`` is the location of the
    main module, if the work refers to it.
    """

    def __init__(self, work: RowTask) -> None:
        """Pickle the work. Raises UsageError where that is impossible."""
        data, of_main = _pickled(work)
        self.main = main_module() if of_main else {}
        self._attach(anonymous_file(), len(data))
        with open(self._file.fileno(), "wb", closefd=False) as file:
            file.write(data)

    def _attach(self, fd: int, size: int) -> None:
        self._file = Descriptor(fd)
        self._size = size

    def received(self) -> RowTask:
        """Return the work. Raises whatever its unpickling raises."""
        work: RowTask = loads(read_at(self._file.fileno(), self._size, 0))
        return work

    def close(self) -> None:
        """Close the file; the children's descriptors stay open. Idempotent."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._attached, (reduction.DupFd(self._file.fileno()), self._size)

    @classmethod
    def _attached(cls, handle: Any, size: int) -> Self:
        sent = cls.__new__(cls)
        sent._attach(handle.detach(), size)
        return sent


def _pickled(work: RowTask) -> tuple[bytes, bool]:
    """Return the pickle, and whether unpickling it imports the main module.

    Lambdas, closures and what the main module defines are pickled by value where cloudpickle is installed.
    """
    by_name, of_main, reason = _by_name(work)
    if by_name and not of_main:
        return by_name, False
    advice = f"{INSTALL_CLOUDPICKLE}, define what it uses at the top level of a module"
    if can_dump_by_value():
        try:
            return dumps_by_value(work), False
        except Exception as error:
            reason, advice = error, "use what can be pickled"
    if by_name and Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
        return by_name, True
    raise UsageError(
        f"the work cannot be sent to the workers ({reason or UNIMPORTABLE}): {advice}, or work without "
        "processes (workers=0)"
    ) from reason


def _by_name(work: RowTask) -> tuple[bytes, bool, Exception | None]:
    """Return a pickle and whether it refers to the main module, or else why there is none."""
    try:
        return *dumps_noting_main(work), None
    except UsageError:
        raise
    except Exception as error:
        return b"", False, error
