"""The tree of errors, as it is drawn and as it is."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from shardprep.formats import DatasetNotFound, MissingExtra, ShardprepError
from support.imports import FILES, tree_of
from support.repository import ROOT

ERRORS = ROOT / "formats" / "errors.py"
LINE = re.compile(r"^    ([│├└─ ]*)(\w+)(?: \(([\w/.]+)\))?(?:  .*)?$")


def drawn() -> dict[str, tuple[str | None, str]]:
    """Each error's parent and home, from the docstring's tree."""
    found: dict[str, tuple[str | None, str]] = {}
    above: list[str] = []
    for line in (ast.get_docstring(tree_of(ERRORS)) or "").partition("::\n")[2].splitlines():
        if match := LINE.match(line):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            found[match[2]] = (above[depth - 1] if depth else None, match[3] or "formats/errors.py")
    return found


def defined() -> dict[str, tuple[str | None, str]]:
    """Each class below ShardprepError: its parent and home, from the source."""
    bases: dict[str, tuple[list[str], str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = (
                    [ast.unparse(base) for base in node.bases],
                    path.relative_to(ROOT).as_posix(),
                )
    found: dict[str, tuple[str | None, str]] = {"ShardprepError": (None, "formats/errors.py")}
    while more := {
        name: (parent, home)
        for name, (parents, home) in bases.items()
        for parent in parents
        if parent in found and name not in found
    }:
        found |= more
    return found


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    assert drawn() == defined()


@pytest.mark.slow
def test_every_error_says_what_it_means() -> None:
    errors = defined()

    assert [
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and node.name in errors and not ast.get_docstring(node)
    ] == []


@pytest.mark.parametrize(
    "error", [DatasetNotFound.at(Path("/nowhere/shards")), MissingExtra.of("it", "Ray", "ray", path="x")]
)
def test_an_error_that_is_also_one_of_python_says_the_same_in_another_process(error: ShardprepError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301

    assert (type(copy), str(copy), copy.path) == (type(error), str(error), error.path)
    if isinstance(error, FileNotFoundError):
        assert (copy.errno, copy.filename, copy.strerror) == (2, error.path, error.message)


def test_an_error_that_python_raises_names_no_command_to_repeat() -> None:
    said = re.compile(r"(same|repeat the) (command|call)\b")

    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if "cli" not in path.relative_to(ROOT).parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        if said.search(node.value) and not node.value.endswith(".")  # which a docstring of one line does
    ] == []
