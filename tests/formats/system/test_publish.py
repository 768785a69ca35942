"""A final name never leads to anything unfinished, and errors keep their text."""

import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from unittest.mock import Mock

import pytest

import shardprep
from shardprep.formats import ShardprepError
from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.files import (
    publish_bytes,
    publishing,
    save_bytes,
)


@pytest.fixture
def work_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def final(tmp_path: Path) -> Path:
    return tmp_path / "final"


def test_a_file_is_not_there_before_it_is_whole(final: Path, work_folder: Path) -> None:
    with publishing(final, work_folder) as file:
        file.write(b"half")
        file.flush()
        assert not final.exists()
        file.write(b" and half")

    assert final.read_bytes() == b"half and half"
    assert list(work_folder.iterdir()) == []


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(final: Path, work_folder: Path, error: type[BaseException]) -> None:
    publish_bytes(final, b"old", work_folder)

    with suppress(error), publishing(final, work_folder) as file:
        file.write(b"new")
        raise error("in the middle")

    assert final.read_bytes() == b"old"
    assert list(work_folder.iterdir()) == []


def test_two_attempts_never_write_to_one_file_nor_through_a_link(
    final: Path, work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = work_folder / "victim"
    victim.write_bytes(b"precious")
    with publishing(final, work_folder) as first, publishing(final, work_folder) as second:
        assert first.name != second.name
    monkeypatch.setattr("secrets.token_hex", lambda size: "same")
    (work_folder / "final.same.tmp").symlink_to(victim)

    with pytest.raises(FileExistsError):
        publish_bytes(final, b"data", work_folder)

    assert victim.read_bytes() == b"precious"
    assert not final.is_symlink()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_never_replaced(make: Callable[[Path], None], final: Path) -> None:
    make(final)
    before = final.lstat()

    with pytest.raises(OperationError, match="not a regular file"):
        save_bytes(final, b"one")

    assert final.lstat().st_mode == before.st_mode
    assert list(final.parent.iterdir()) == [final]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_ends_early_leaves_the_file_as_it_was(
    error: BaseException, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bytes(final, b"one")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as found:
        save_bytes(final, b"two")

    assert final.read_bytes() == b"one"
    assert list(final.parent.iterdir()) == [final]
    assert getattr(found.value, "filename", str(final)) == str(final)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_new_file_replaces_none_and_nothing_is_left_of_it_if_it_ends_early(
    error: BaseException, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=error))
        with pytest.raises(type(error)):
            save_bytes(final, b"none", is_new=True)
    assert not list(final.parent.iterdir())

    save_bytes(final, b"one", is_new=True)
    with pytest.raises(FileExistsError) as found:
        save_bytes(final, b"two", is_new=True)

    assert final.read_bytes() == b"one"
    assert list(final.parent.iterdir()) == [final]
    assert found.value.filename == str(final)


def every_error() -> Iterator[type[ShardprepError]]:
    for module in walk_packages(shardprep.__path__, "shardprep."):
        if not re.search("tf_inputs|_data$|torchvision|albumentations|__main__", module.name):
            import_module(module.name)
    waiting = [ShardprepError]
    while waiting:
        yield (kind := waiting.pop())
        waiting += kind.__subclasses__()


@pytest.mark.slow
def test_every_error_survives_pickling_and_being_made_of_a_message_as_pytorch_does() -> None:
    lines = "Caught it in a worker.\nOriginal Traceback (most recent call last):\n  a line\nits\x1b last line"
    for kind in every_error():
        error = kind(lines)
        error.path, error.key = "a path", "a key"
        again = pickle.loads(pickle.dumps(error))  # noqa: S301

        assert (type(again), vars(again)) == (kind, vars(error))
        assert str(again).splitlines() == lines.replace("\x1b", r"\x1b").splitlines()
