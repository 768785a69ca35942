"""The tree of errors, as it is drawn and as it is."""

import ast
import re

import pytest
from imports import FILES, tree_of
from repository import ROOT

ERRORS = ROOT / "formats" / "errors.py"
LINE = re.compile(r"^    ([│├└─ ]*)(\w+)(?: \(([\w/.]+)\))?(?:  .*)?$")


def drawn() -> dict[str, tuple[str | None, str]]:
    """Each error's parent and home, from the docstring's tree."""
    found: dict[str, tuple[str | None, str]] = {}
    above: list[str] = []
    docstring = ast.get_docstring(tree_of(ERRORS)) or ""
    for line in docstring.partition("::\n")[2].splitlines():
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
