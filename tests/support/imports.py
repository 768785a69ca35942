"""The imports between the repository's own files, as a graph."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.repository import ROOT

FILES = [path for top in ("cli", "formats", "loaders") for path in sorted((ROOT / top).rglob("*.py"))]


def module_of(path: Path) -> str:
    """The dotted name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shardprep", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    """The file, parsed once."""
    return ast.parse(path.read_text())


def _base(path: Path, node: ast.ImportFrom) -> str:
    """The module that ``from ... import`` names, absolute."""
    if not node.level:
        return node.module or ""
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, node.module] if node.module else package)


@cache
def imported(path: Path) -> frozenset[Path]:
    """The repository's files that a file imports from, anywhere in it."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = _base(path, node)
            names = [name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (MODULES[name] for name in names if name in MODULES)
