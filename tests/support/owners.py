"""Which classes own something of the system, and what every owner's instance keeps to."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardprep import formats, loaders
from shardprep.formats.errors import NotCopyable, UsageError
from shardprep.formats.runtime.owned import Owned

LETTING_GO = {"__del__", "__exit__", "close", "shutdown"}
MAKERS = {
    *("open", "fdopen", "pipe", "dup", "socket", "socketpair", "Pipe", "Context", "mmap", "memmap", "open_memmap"),
    *("memfd_create", "pidfd_open", "eventfd", "SharedMemory", "TemporaryFile", "NamedTemporaryFile", "ExitStack"),
    *("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "Popen", "DefaultSelector"),
    *("Descriptor", "LockDescriptor", "FIFOQueue"),
}  # fmt: skip
KEPT = {
    *("Thread", "SpawnProcess", "BaseProcess", "Popen", "Connection", "socket", "Socket", "mmap", "ExitStack"),
    *("Executor", "ThreadPoolExecutor", "BaseSelector", "Descriptor", "LockDescriptor", "SpawnedProcess", "Channel"),
}  # fmt: skip


def modules() -> Iterator[ModuleType]:
    """All of formats and loaders that can be imported here."""
    for package in (formats, loaders):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("reader_process"):
                with contextlib.suppress(ImportError):
                    yield importlib.import_module(found.name)


def classes() -> Iterator[type]:
    """All classes that these modules define, but protocols, which have no instances."""
    for module in modules():
        for value in vars(module).values():
            defined_here = inspect.isclass(value) and value.__module__ == module.__name__
            if defined_here and not getattr(value, "_is_protocol", False):
                yield value


def can_be_let_go(cls: type) -> bool:
    """Whether the class, or one of the package that it is derived from, has a method for it."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith(("shardprep", "owners"))]
    bases = (AbstractContextManager, Executor)
    return any(LETTING_GO & set(vars(base)) for base in ours) or issubclass(cls, bases)


def keeps_something(source: str) -> bool:
    """Whether an instance keeps, as an attribute, what is made or typed as something of the system."""
    (tree,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(tree, ast.ClassDef)
    fields = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return any(KEPT & names_in(field.annotation) for field in fields) or any(map(_keeps, methods))


def _keeps(method: ast.FunctionDef) -> bool:
    annotations = {arg.arg: names_in(arg.annotation) for arg in [*method.args.args, *method.args.kwonlyargs]}
    for node in ast.walk(method):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(map(_is_attribute, targets)):
            given = {name for used in names_in(node.value) for name in annotations.get(used, ())}
            kept = given | names_in(getattr(node, "annotation", None))
            if KEPT & kept or MAKERS & calls_in(node.value) or LETTING_GO & set(map(_name, targets)):
                return True
    return False


def _is_attribute(target: ast.expr | None) -> bool:
    return target is not None and any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        for node in ast.walk(target)
    )


def _name(target: ast.expr | None) -> str:
    return getattr(target, "attr", "")


def names_in(node: ast.AST | None) -> set[str]:
    found = ast.walk(node) if node else ()
    return {getattr(each, "attr", getattr(each, "id", "")) for each in found} - {""}


def calls_in(node: ast.AST | None) -> set[str]:
    calls = [each.func for each in (ast.walk(node) if node else ()) if isinstance(each, ast.Call)]
    return {getattr(call, "attr", getattr(call, "id", "")) for call in calls}


def owns(cls: type) -> bool:
    """Whether it is to refuse to be copied, as far as its code tells."""
    return can_be_let_go(cls) or keeps_something(inspect.getsource(cls))


@dataclass
class Config:
    """What a trainer keeps its parts in."""

    part: Any
    steps: int = 1


Attempt = Callable[[Any], object]
ATTEMPTS: dict[str, Attempt] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "deepcopy of a list": lambda owner: copy.deepcopy([1, {"part": owner}]),
    "asdict": lambda owner: asdict(Config(owner)),
}


def descriptors() -> dict[str, str]:
    """The open files of this process."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[link.name] = str(link.readlink())
    return found


def assert_refuses_copies(owner: object, temporary: Path) -> None:
    """Each attempt raises at once, changes no descriptor and leaves nothing in the temporary folder."""
    gc.collect()
    before = descriptors(), set(temporary.iterdir())
    of_a_dataclass = ".*" if is_dataclass(owner) else ""  # asdict asks its fields
    for attempt in ATTEMPTS.values():
        with pytest.raises(
            NotCopyable, match=f"{of_a_dataclass or type(owner).__name__} cannot be copied"
        ) as caught:
            attempt(owner)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, UsageError)
        del caught
    gc.collect()
    assert (descriptors(), set(temporary.iterdir())) == before


@contextlib.contextmanager
def files_opened_afterwards(folder: Path, count: int = 40) -> Iterator[None]:
    """They get the numbers that something has closed; at the end they are empty and still open."""
    with ExitStack() as opened:
        files = [opened.enter_context((folder / str(number)).open("wb")) for number in range(count)]
        yield
        for number, file in enumerate(files):
            status = os.fstat(file.fileno())
            assert (status.st_ino, status.st_size) == ((folder / str(number)).stat().st_ino, 0)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Within it the temporary folder of this process is a new one in ``folder``."""
    before, made = tempfile.tempdir, folder / "temporary"
    made.mkdir()
    tempfile.tempdir = str(made)
    try:
        yield made
    finally:
        tempfile.tempdir = before


def is_owned(cls: type) -> bool:
    return issubclass(cls, Owned)
