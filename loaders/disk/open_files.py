"""Files that are read by offset, and the same ones once more without the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...formats.archive_file import OPEN_FLAGS, naming


@dataclass(frozen=True, eq=False)
class OpenFiles:
    """Descriptors that the stack closes; ``direct`` are filled by :meth:`open_direct`."""

    stack: ExitStack
    descriptors: tuple[int, ...]
    direct: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Sequence[Path], stack: ExitStack) -> OpenFiles:
        """Raises OSError, which names the file, where one cannot be opened or read."""
        return cls(stack, tuple(_opened(path, stack) for path in paths))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(os.fstat(descriptor).st_size for descriptor in self.descriptors)

    def open_direct(self) -> bool:
        """Whether all could be opened with O_DIRECT. Asking twice does nothing more."""
        flag = getattr(os, "O_DIRECT", 0)
        with suppress(OSError):
            for descriptor in self.descriptors[len(self.direct) :] if flag else ():
                name = f"/proc/self/fd/{descriptor}"  # a scratch file has no other name
                self.direct.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC | flag))
                self.stack.callback(os.close, self.direct[-1])
        return len(self.direct) == len(self.descriptors)


def _opened(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, OPEN_FLAGS)
    stack.callback(os.close, descriptor)
    with naming(path):
        os.pread(descriptor, 1, 0)
    return descriptor
