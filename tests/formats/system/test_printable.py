"""Text from files is shown on one line, printable and not too long; the attributes keep it unchanged."""

import pickle
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
from hypothesis import example, given, strategies as st

import shardprep
from shardprep.formats import BadImage, Finding, ShardprepError
from shardprep.formats.errors import MOST_CHARACTERS, printable
from support.datasets import prep_here
from support.source_builders import Miniature, tar_of

HOSTILE = "a\x1b[2J\x9b\r\nb\udcff\u202eexe\u2028\x00"
MINI = Miniature()
texts = st.text(st.characters(codec=None), max_size=60)  # lone surrogates, too


@given(texts, st.integers(2, 80))
@example(HOSTILE, 5)
@example("\x1b" * 40, 30)
def test_shown_text_is_printable_bounded_and_stays_as_it_is(text: str, most: int) -> None:
    shown = printable(text, most)

    assert shown.isprintable()
    assert len(shown) <= most
    assert printable(shown, most) == shown
    shown.encode()


@given(texts)
def test_printable_text_that_is_not_too_long_is_shown_as_it_is(text: str) -> None:
    plain = "".join(c for c in text if c.isprintable())

    assert printable(plain) == plain


def test_both_ends_of_a_long_text_are_shown() -> None:
    shown = printable("beginning" + "x" * 900_000 + "end")

    assert len(shown) == MOST_CHARACTERS
    assert shown.startswith("beginningx")
    assert "x…x" in shown
    assert shown.endswith("xend")


def test_an_error_shows_printable_text_and_keeps_what_it_was_given() -> None:
    long = HOSTILE * 10_000
    error = BadImage(long, path=long + "1", shard=long + "2", key=long + "3")
    error.add_note(f"{long}\nsecond")

    again = pickle.loads(pickle.dumps(error))  # noqa: S301

    for shown in (str(error), repr(error), str(again), repr(again)):
        assert shown.isprintable()
        assert len(shown) < 5 * MOST_CHARACTERS
    assert all(line.isprintable() for note in error.__notes__ for line in note.split("\n"))
    assert (again.message, again.path, again.key) == (long, long + "1", long + "3")


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


def test_a_path_of_bytes_is_a_path() -> None:
    assert str(ShardprepError("is odd", path=b"\xff/\x1b")) == r"\udcff/\x1b: is odd"  # type: ignore[arg-type]


def test_a_finding_shows_printable_text() -> None:
    finding = Finding(HOSTILE, HOSTILE * 1000, HOSTILE)

    assert str(finding).isprintable()
    assert len(str(finding)) < 4 * MOST_CHARACTERS


def assert_one_harmless_line(text: str) -> None:
    assert text.endswith("\n")
    assert text[:-1].isprintable(), text[:2000]
    assert len(text) < 5 * MOST_CHARACTERS


def test_a_name_in_an_archive_cannot_drive_a_terminal(tmp_path: Path) -> None:
    MINI.write_tars(tmp_path)
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(tar_of({"ILSVRC2012_val_\x1b]0;\x07.JPEG": b"x"}))

    done = prep_here("convert", tmp_path, tmp_path / "out", "--split", "val", "--quiet")

    assert done.returncode == 1
    assert_one_harmless_line(done.stderr)


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nprep: lines", "\u202etxt.exe"])
def test_a_path_cannot_drive_a_terminal(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()

    for words in (["verify", tmp_path / name], ["convert", tmp_path / name, tmp_path / "out", "--quiet"]):
        done = prep_here(*words)
        assert done.returncode in (1, 2)
        lines = (done.stdout + done.stderr).split("\n")
        assert len(lines) <= 4  # a finding, the sum, what to give, and nothing behind the last line break
        assert all(line.isprintable() for line in lines)


def test_a_file_of_long_lines_is_not_quoted_whole(tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path)
    solution = tmp_path / "LOC_val_solution.csv"
    for row in ("x" * 900_000, f"ILSVRC2012_val_00000001,{'n' * 100_000}\x1b 1 2 3 4"):
        solution.write_text(f"ImageId,PredictionString\n{row}\n")

        done = prep_here("convert", tmp_path, tmp_path / "out", "--split", "val", "--quiet")

        assert done.returncode == 1
        assert_one_harmless_line(done.stderr)


def test_an_error_of_the_system_names_its_file_harmlessly(tmp_path: Path) -> None:
    deep = tmp_path / "\x1b[2J"
    deep.mkdir()
    (deep / "loop").symlink_to("loop")

    done = prep_here("inspect", deep / "loop")

    assert done.returncode in (2, 3)
    assert_one_harmless_line(done.stderr)
