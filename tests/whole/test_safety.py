"""No code is run from data, and pickles are read in one place only."""

import ast

import pytest

from support.imports import FILES, tree_of
from support.repository import ROOT

CODE_FROM_DATA = {"eval", "exec", "recv_pyobj", "send_pyobj", "extract", "extractall", "system", "popen"}
PICKLES = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "yaml"}


def runs_code(node: ast.AST) -> bool:
    """Whether a node is a call that runs code from its arguments, or allows it."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
    return name in CODE_FROM_DATA or True in (options.get("allow_pickle"), options.get("shell"))


def roots_of(node: ast.AST) -> set[str]:
    """The top-level packages that an import names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


@pytest.mark.slow
def test_no_file_runs_code_from_data_and_one_reads_pickles() -> None:
    nodes = [(path.relative_to(ROOT).as_posix(), node) for path in FILES for node in ast.walk(tree_of(path))]

    assert [(name, ast.unparse(node)) for name, node in nodes if runs_code(node)] == []
    assert {name for name, node in nodes if roots_of(node) & PICKLES} == {"loaders/batches/pickling.py"}


@pytest.mark.parametrize(
    "code",
    ["eval(x)", "pickle.loads(x); os.system(x)", "np.load(x, allow_pickle=True)", "run(x, shell=True)"],
)
def test_code_from_data_would_be_found(code: str) -> None:
    assert any(map(runs_code, ast.walk(ast.parse(code))))
