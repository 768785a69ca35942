"""The entries of docs/training/from-tensorpack.md: names of tensorpack, and their replacements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from support.documents import anchor_of
from support.repository import ROOT

PAGE = (ROOT / "docs" / "training" / "from-tensorpack.md").read_text()
WHOLE, PREAMBLE, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.S)


SECTIONS = {anchor_of(text.partition("\n")[0]): text for text in re.split(r"^#+ ", PAGE, flags=re.M)}


@dataclass(frozen=True)
class Entry:
    """A row: the names in its first cell, and the code, or the section that has it, in its second."""

    names: tuple[str, ...]
    expressions: tuple[str, ...]
    section: str | None

    def run(self, names: dict[str, Any]) -> Ran:
        """The values of the expressions; ``names`` are those of the preamble, and a section adds its own."""
        if self.section:
            (program,) = re.findall(r"```python\n(.*?)```", SECTIONS[self.section], re.S)
            exec(program, names)  # noqa: S102
        return Ran([eval(each, names) for each in self.expressions], names)  # noqa: S307


@dataclass(frozen=True)
class Ran:
    values: list[Any]
    names: dict[str, Any] = field(repr=False)

    @property
    def value(self) -> Any:
        """Return the only element."""
        (value,) = self.values
        return value


def entry_of(row: str) -> Entry:
    there, here, _ = re.split(r"\s*\|\s*", row.removeprefix("|").removesuffix("|").strip(), maxsplit=2)
    section = re.search(r"\]\(#(.*?)\)", here)
    calls = re.findall(r"`([\w.]+).*?`", there)
    return Entry(tuple(calls), tuple(re.findall(r"`(.*?)`", here)), section and section[1])


ENTRIES = [entry_of(row) for row in re.findall(r"^\| `.*$", PAGE, re.M)]


def started(program: str) -> dict[str, Any]:
    """The names of a program that ran as the main module."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)  # noqa: S102
    return names
