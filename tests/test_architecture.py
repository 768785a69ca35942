"""The layers import only downwards, and some things are done nowhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = ["formats", "loaders", "cli"]  # lowest first
ROOT = Path(__file__).parent.parent
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]

FORBIDDEN_IMPORTS = {"marshal", "shelve", "dill", "joblib", "yaml", "tarfile_extract"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "extract", "extractall", "system", "popen"}
MAY_PICKLE = {"loaders/trusted.py"}  # a parent and its own child


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def places_and_nodes() -> Iterator[tuple[str, ast.AST]]:
    """All that is in any file, and where: one file after the other, for a test that kept them would be slow."""
    for path in FILES:
        for node in nodes_of(path):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def file_of(place: str) -> str:
    return place.rpartition(":")[0]


def roots_of(node: ast.AST) -> set[str]:
    """The packages that an import is from."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def depth(path: Path) -> int:
    """How many folders below the top a file lies."""
    return len(path.relative_to(ROOT).parts) - 1


def imported_layers(path: Path) -> Iterator[str]:
    """The layer of every ``from ..layer import`` and ``shardprep.layer`` in a file."""
    for node in nodes_of(path):
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


def test_no_file_runs_code_from_data() -> None:
    assert [place for place, node in places_and_nodes() if is_dangerous(node)] == []


def is_dangerous(node: ast.AST) -> bool:
    """A call of what runs code, or is told to."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
    return name in FORBIDDEN_CALLS or True in (given.get("allow_pickle"), given.get("shell"))


def test_no_file_reads_pickles() -> None:
    names = {"pickle", "cPickle"} | FORBIDDEN_IMPORTS
    found = {file_of(place) for place, node in places_and_nodes() if roots_of(node) & names}

    assert found == MAY_PICKLE


def test_no_file_holds_two_nouns() -> None:
    assert [path for path in FILES if len(path.read_text().splitlines()) > 300] == []


def test_one_file_imports_tensorflow() -> None:
    names = {"tensorflow", "keras"}
    found = {file_of(place) for place, node in places_and_nodes() if roots_of(node) & names}

    assert found == {"loaders/tf_inputs/framework.py"}


@pytest.mark.parametrize(
    "code",
    ["eval(x)", "pickle.loads(x); os.system(x)", "np.load(x, allow_pickle=True)", "run(x, shell=True)"],
)
def test_what_runs_code_would_be_found(code: str) -> None:
    assert any(map(is_dangerous, ast.walk(ast.parse(code))))
