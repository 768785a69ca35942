"""Errors of commands with ``--json``: one object on stdout, one line on stderr."""

import errno
import json
from pathlib import Path

import pytest

from shardprep.cli.console.output import asks_for_json
from support.datasets import converted, prep, prep_here


def error_of(*words: object, code: int) -> dict[str, object]:
    """The error object of a command that fails with that exit code."""
    done = prep_here(*words, "--json")

    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("prep: ")
    (error,) = json.loads(done.stdout).values()
    assert error["exit_code"] == code
    return error  # type: ignore[no-any-return]


def test_damage_has_its_kind_place_and_message(tmp_path: Path) -> None:
    error = error_of("inspect", tmp_path, code=1)

    assert error == {
        "kind": "ManifestDamaged",
        "message": "no manifest.json: not a dataset, or its conversion has not finished",
        "exit_code": 1,
        "path": str(tmp_path),
        "shard": None,
        "key": None,
    }


def test_a_path_is_told_with_all_its_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "a  b"
    folder.mkdir()

    assert str(folder) in prep_here("inspect", folder).stderr


def test_an_unknown_source_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()

    error = error_of("convert", tmp_path / "source", tmp_path / "out", code=2)

    assert (error["kind"], error["path"]) == ("UsageError", str(tmp_path / "source"))


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["verify"], "prep verify"),
        (["convert", ".", "out", "--seed", "-1"], "prep convert"),
        (["nonsense"], "prep"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_an_object_too(words: list[str], command: str) -> None:
    error = error_of(*words, code=2)

    assert (error["kind"], error["command"]) == ("UsageError", command)
    assert error["message"]


def test_an_error_of_the_system_has_its_number_and_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    error = error_of("inspect", tmp_path / "loop", code=3)

    assert (error["kind"], error["errno"], error["path"]) == ("OSError", errno.ELOOP, f"{tmp_path}/loop")


def test_a_name_that_is_not_text_is_in_the_object_as_it_is(tmp_path: Path) -> None:
    name = b"s_\xff".decode(errors="surrogateescape")

    error = error_of("convert", tmp_path / name, tmp_path / "out", code=2)

    assert error["path"] == f"{tmp_path}/{name}"


def test_without_json_stdout_stays_empty(tmp_path: Path) -> None:
    assert prep_here("inspect", tmp_path).stdout == ""


def test_what_follows_two_dashes_is_no_option() -> None:
    assert asks_for_json(["verify", "x", "--json"])
    assert not asks_for_json(["verify", "--", "--json"])


@pytest.mark.slow
def test_results_that_cannot_be_written_are_no_object(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "val", split="val")

    done = prep("inspect", tmp_path / "val", "--json", prefix=["sh", "-c", '"$@" >/dev/full', "sh"])

    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
