"""The folders import in one direction, and some things are done nowhere."""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import FILES, MODULES, TOPS, circle, files_graph, folder_of, folders_graph, imported, tree_of
from repository import ROOT
from setuptools import find_packages

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLE = {
    folder: (sentence, set(re.findall(r"`([\w/]+)`", imports)))
    for folder, sentence, imports in re.findall(r"^\| `([\w/]+)` \| (.+?) \| (.*?) \|$", PAGE, re.M)
}
"""Each folder of the map: what is said of it, and the folders that its files may import from."""

MOST_ENTRIES = 14

FORBIDDEN_IMPORTS = {"marshal", "shelve", "dill", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "extract", "extractall", "system", "popen"}
MAY_PICKLE = {"loaders/buffers/pickling.py"}  # a parent and its own child


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> None:
    """Parse all files, and exempt the trees from garbage collection, which would take long at each test."""
    for path in FILES:
        tree_of(path)
    gc.freeze()


def places_and_nodes() -> Iterator[tuple[str, ast.AST]]:
    """All that is in any file, and where."""
    for path in FILES:
        name = path.relative_to(ROOT)
        for node in ast.walk(tree_of(path)):
            yield f"{name}:{getattr(node, 'lineno', 1)}", node


def file_of(place: str) -> str:
    return place.rpartition(":")[0]


def roots_of(node: ast.AST) -> set[str]:
    """The packages that an import is from."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_the_map_shows_every_folder_and_no_other() -> None:
    assert set(TABLE) == {
        folder_of(path) for path in FILES if folder_of(path) != "formats/sources/sample/photographs"
    }


def test_the_map_says_of_a_folder_what_its_docstring_says() -> None:
    said = {folder: sentence for folder, (sentence, _) in TABLE.items()}

    assert said == {
        folder: (ast.get_docstring(tree_of(ROOT / folder / "__init__.py")) or "").partition("\n")[0]
        for folder in TABLE
    }


@pytest.mark.parametrize("folder", sorted(TABLE))
def test_a_folder_imports_only_what_the_map_allows(folder: str) -> None:
    _, allowed = TABLE[folder]
    found = {
        f"{path.name} imports {other.relative_to(ROOT)}"
        for path in (ROOT / folder).glob("*.py")
        if path.name != "__init__.py"
        for other in imported(path)
        if folder_of(other) not in {*allowed, folder}
    }

    assert found == set()


@pytest.mark.parametrize("folder", sorted(TABLE))
def test_the_map_allows_nothing_that_is_not_needed(folder: str) -> None:
    assert TABLE[folder][1] == folders_graph()[folder]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(files_graph()) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert circle(folders_graph()) == []


def test_a_circle_would_be_found() -> None:
    assert circle({1: {2}, 2: {3}, 3: {2}, 4: set()}) in ([2, 3], [3, 2])


@pytest.mark.parametrize("folder", ["formats", "loaders", "cli"])
def test_a_lower_layer_imports_no_higher_one(folder: str) -> None:
    lower = ["formats", "loaders", "cli"]
    allowed = set(lower[: lower.index(folder) + 1])

    assert {
        folder_of(other).partition("/")[0]
        for path in (ROOT / folder).rglob("*.py")
        for other in imported(path)
    } <= allowed


def test_a_folder_can_be_seen_at_a_glance() -> None:
    entries: dict[Path, set[Path]] = defaultdict(set)
    for path in FILES:
        if path.name != "__init__.py":
            for part in (path, *path.parents):
                if part.parent != ROOT and part != ROOT and ROOT in part.parents:
                    entries[part.parent].add(part)

    assert {str(folder): len(found) for folder, found in entries.items() if len(found) > MOST_ENTRIES} == {}


def test_every_folder_is_packaged() -> None:
    packages = {f"shardprep.{folder_of(path).replace('/', '.')}" for path in FILES}

    assert packages <= set(find_packages(str(ROOT / "src")))


def test_no_class_name_stands_twice() -> None:
    homes = defaultdict(list)
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)

    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


@pytest.mark.slow
def test_no_file_uses_what_another_keeps_private() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in sorted(borrowed_from_others(tree_of(path)))
    ] == []


def borrowed_from_others(tree: ast.Module) -> set[str]:
    """Private attributes that are read from objects and defined nowhere in the file."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    }
    own |= {
        n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    return {
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and node.attr not in {"_replace", "_asdict", "_fields", "_make"}  # of named tuples, public
        and node.attr not in own
        and ast.unparse(node.value)
        not in {"self", "cls", "super()", "os", "sys", "multiprocessing.process", "np.core"}
    }


def test_an_import_within_a_function_says_why() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in late_imports(path)
        if not is_explained(path, node)
    ] == []


def late_imports(path: Path) -> Iterator[ast.stmt]:
    """Imports of the repository's own files that run when a function does."""
    for function in ast.walk(tree_of(path)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (
                    node.level or (node.module or "").startswith("shardprep")
                ):
                    yield node


def is_explained(path: Path, node: ast.stmt) -> bool:
    """Whether a comment stands beside the import or the line above it, or above the first of several."""
    lines = path.read_text().splitlines()
    above = node.lineno - 2
    while re.match(r"\s+from ", lines[above]):
        above -= 1
    return "#" in lines[node.lineno - 1] or "#" in lines[above] or "#" in lines[above + 1]


@pytest.mark.slow
def test_no_file_runs_code_from_data() -> None:
    assert [place for place, node in places_and_nodes() if is_dangerous(node)] == []


def is_dangerous(node: ast.AST) -> bool:
    """A call of what runs code, or is told to."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
    return name in FORBIDDEN_CALLS or True in (given.get("allow_pickle"), given.get("shell"))


@pytest.mark.slow
def test_no_file_reads_pickles() -> None:
    names = {"pickle", "cPickle"} | FORBIDDEN_IMPORTS
    found = {file_of(place) for place, node in places_and_nodes() if roots_of(node) & names}

    assert found == MAY_PICKLE


def test_no_file_holds_two_nouns() -> None:
    assert [path for path in FILES if len(path.read_text().splitlines()) > 300] == []


@pytest.mark.slow
def test_one_file_imports_tensorflow() -> None:
    names = {"tensorflow", "keras"}
    found = {file_of(place) for place, node in places_and_nodes() if roots_of(node) & names}

    assert found == {"loaders/tf_inputs/tensors/framework.py"}


@pytest.mark.parametrize(
    "code",
    ["eval(x)", "pickle.loads(x); os.system(x)", "np.load(x, allow_pickle=True)", "run(x, shell=True)"],
)
def test_what_runs_code_would_be_found(code: str) -> None:
    assert any(map(is_dangerous, ast.walk(ast.parse(code))))


def test_the_graph_knows_every_file() -> None:
    assert set(MODULES.values()) == set(FILES)
    assert {folder_of(path).partition("/")[0] for path in FILES} == set(TOPS)
