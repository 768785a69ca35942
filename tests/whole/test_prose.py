"""The language of the source: docstrings, comments and messages."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import FILES, tree_of
from repository import ROOT

PERSONS = re.compile(
    r"\b(who|whom|whose|whoever|he|him|his|she|nobody|somebody|someone|anybody|anyone|everybody)\b", re.I
)
"""The subject of a sentence is an object of the code."""

SOURCES = [*FILES, ROOT / "src" / "shardprep" / "__init__.py"]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and strings of a file, with their lines."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string


def found_in(path: Path) -> list[str]:
    """Where a file speaks of persons."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for line, text in texts_of(path)
        for match in PERSONS.finditer(text)
    ]


@pytest.mark.slow
def test_no_sentence_is_about_a_person() -> None:
    assert [place for path in SOURCES for place in found_in(path)] == []


def test_a_sentence_about_a_person_would_be_found(tmp_path: Path) -> None:
    assert PERSONS.findall("# Whoever reads this, he knows what nobody else does") == [
        "Whoever",
        "he",
        "nobody",
    ]
    assert not PERSONS.search("the whole header, where shells wait")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ast.Module, ast.ClassDef, ast.FunctionDef])
def test_the_first_line_of_a_docstring_is_a_sentence_of_its_own(kind: type[ast.AST]) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, kind)
        and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (first := (ast.get_docstring(node) or "x.").partition("\n")[0])[-1] not in ".:?"
    ] == []
