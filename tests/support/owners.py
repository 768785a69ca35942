"""What every owner of something of the system keeps to."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import NotCopyable, UsageError


@dataclass
class Config:
    """What a trainer keeps its parts in."""

    part: Any
    steps: int = 1


Attempt = Callable[[Any], object]
ATTEMPTS: dict[str, Attempt] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "deepcopy of a list": lambda owner: copy.deepcopy([1, {"part": owner}]),
    "asdict": lambda owner: asdict(Config(owner)),
}


def descriptors() -> dict[str, str]:
    """The open files of this process."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[link.name] = str(link.readlink())
    return found


def assert_refuses_copies(owner: object, temporary: Path) -> None:
    """Each attempt raises at once, changes no descriptor and leaves nothing in the temporary folder."""
    gc.collect()
    before = descriptors(), set(temporary.iterdir())
    for attempt in ATTEMPTS.values():
        with pytest.raises(NotCopyable, match=f"{type(owner).__name__} cannot be copied") as caught:
            attempt(owner)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, UsageError)
        del caught
    gc.collect()
    assert (descriptors(), set(temporary.iterdir())) == before


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Within it the temporary folder of this process is a new one in ``folder``."""
    before, made = tempfile.tempdir, folder / "temporary"
    made.mkdir()
    tempfile.tempdir = str(made)
    try:
        yield made
    finally:
        tempfile.tempdir = before
