"""The layers import only downwards, and some things are done nowhere."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

LAYERS = ["formats", "loaders", "cli"]  # lowest first
ROOT = Path(__file__).parent.parent
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]

FORBIDDEN_IMPORTS = {"marshal", "shelve", "dill", "joblib", "yaml", "tarfile_extract"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "extract", "extractall", "system", "popen"}
MAY_PICKLE = {"loaders/trusted.py"}  # a parent and its own child


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def depth(path: Path) -> int:
    """How many folders below the top a file lies."""
    return len(path.relative_to(ROOT).parts) - 1


def imported_layers(path: Path) -> Iterator[str]:
    """The layer of every ``from ..layer import`` and ``shardprep.layer`` in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level == depth(path) + 1 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.startswith("shardprep."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("shardprep."))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_lower_layers(layer: str) -> None:
    lower = set(LAYERS[: LAYERS.index(layer)])
    for path in (ROOT / layer).rglob("*.py"):
        assert set(imported_layers(path)) <= lower, path


def test_every_folder_is_packaged() -> None:
    packaged = (ROOT / "setup.cfg").read_text()
    for layer in LAYERS:
        for folder in {p.parent for p in (ROOT / layer).rglob("*.py")}:
            assert f"shardprep.{'.'.join(folder.relative_to(ROOT).parts)}" in packaged


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_runs_code_from_data(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in FORBIDDEN_CALLS, f"{path}:{node.lineno} calls {name}"
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            assert given.get("allow_pickle") is not True, f"{path}:{node.lineno}"
            assert given.get("shell") is not True, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_reads_pickles(path: Path) -> None:
    names = {"pickle", "cPickle"} | FORBIDDEN_IMPORTS
    if str(path.relative_to(ROOT)) in MAY_PICKLE:
        pytest.skip("talks to its own children only")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not {a.name.partition(".")[0] for a in node.names} & names
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.partition(".")[0] not in names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_holds_two_nouns(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_file_imports_tensorflow(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            imports = any(name.partition(".")[0] in ("tensorflow", "keras") for name in names)
            assert not imports or path == ROOT / "loaders" / "tf_inputs" / "framework.py"
