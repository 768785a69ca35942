"""The documents: pages, fenced blocks, links and headings."""

import re
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"  # directives of Sphinx around the README, and nothing else
DOCS = sorted(set((ROOT / "docs").rglob("*.md")) - {INDEX})
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``line`` is that of its opening fence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order. Raises ValueError for a fence that is not closed."""
    text = page.read_text()
    fences = list(re.finditer(r"^```(.*)$", text, re.M))
    if len(fences) % 2 or any(fence[1] for fence in fences[1::2]):
        raise ValueError(f"{page} has a fence that is not closed")
    return [
        Block(page, text.count("\n", 0, start.start()) + 1, start[1], text[start.end() + 1 : end.start()])
        for start, end in zip(fences[::2], fences[1::2], strict=True)
    ]


def block_after(page: Path, mark: str) -> Block:
    """The block that directly follows an HTML comment."""
    (line,) = [n for n, line in enumerate(page.read_text().splitlines(), 1) if line == f"<!-- {mark} -->"]
    (block,) = [block for block in blocks_of(page) if block.line == line + 1]
    return block


def prose_of(page: Path) -> str:
    """The text outside of fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links_of(page: Path) -> list[str]:
    """The targets of links to other files, or to headings, of this repository."""
    return sorted(set(re.findall(r"\]\(((?!https?:)[^)]+)\)", prose_of(page))))


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    """The anchors of all headings of a page."""
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.M)}
