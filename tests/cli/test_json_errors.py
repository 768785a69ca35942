"""Errors of commands with ``--json``: one object on stdout, one line on stderr."""

import json

import pytest

from support.datasets import prep_here


def error_of(*words: object, code: int) -> dict[str, object]:
    """The error object of a command that fails with that exit code."""
    done = prep_here(*words, "--json")

    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("prep: ")
    (error,) = json.loads(done.stdout).values()
    assert error["exit_code"] == code
    return error  # type: ignore[no-any-return]


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
