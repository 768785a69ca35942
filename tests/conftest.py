"""What holds for every test."""

import compileall
import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from shardprep import cli, formats, loaders
from shardprep.formats import convert, make_sample
from support.datasets import converted
from support.faulty_proxy import Proxy, faulty_proxy
from support.object_server import as_endpoint, object_server
from support.process_table import children, threads
from support.waiting import until

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

NEEDS_TENSORFLOW = [
    "loaders/frameworks/test_tf_*.py",
    "whole/test_from_tensorpack.py",
    "whole/test_examples.py",
]
collect_ignore_glob = [] if find_spec("tensorflow") else NEEDS_TENSORFLOW


# Every run tries the same examples: what passed passes again. `--hypothesis-profile explore` tries others.
settings.register_profile("repeatable", deadline=None, derandomize=True)  # a busy machine is no failure
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is torture is slow, too, and so is all that imports TensorFlow."""
    for item in items:
        if item.get_closest_marker("torture") or item.path.name.startswith("test_tf_"):
            item.add_marker(pytest.mark.slow)


TOOLS = re.compile("strace|jpegtran|chromium|selenium|axe-core|pyarrow|webdataset|pyright")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped for a missing tool where CI is set."""
    return _with_tools((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that is skipped for a missing tool where CI is set."""
    return _with_tools((yield))


def _with_tools(report: Report) -> Report:
    if report.skipped and os.environ.get("CI") and not os.environ.get("ALLOW_MISSING_TOOLS"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if TOOLS.search(reason):
            report.outcome, report.longrepr = "failed", f"CI is set, and this would be skipped. {reason}"
    return report


def pytest_sessionstart() -> None:
    """Compile the package once: under PYTHONDONTWRITEBYTECODE each process of a test would do so."""
    for package in (cli, formats, loaders):
        compileall.compile_dir(package.__path__[0], quiet=2)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

_modules_frozen = 0


def freeze_what_is_there() -> None:
    """Exempt what is there from garbage collection after each test: TensorFlow has a million objects."""
    global _modules_frozen
    gc.collect()
    gc.freeze()
    _modules_frozen = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def the_collector_sees_this_file_only() -> None:
    """Between files no test's objects are alive."""
    freeze_what_is_there()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """No process and no thread that a test started is there after it."""
    if len(sys.modules) > _modules_frozen + 300:
        freeze_what_is_there()
    processes_before, threads_before = children(), threads()
    yield
    gc.collect()
    assert children() <= processes_before, "a process outlived the test"
    until(lambda: threads() <= threads_before)  # what was dropped without being closed ends in a thread


@pytest.fixture(scope="session", autouse=True)
def no_seal_is_left_in_the_home_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the processes that they start, have a cache folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature ILSVRC12 in its official packaging: 4 classes; 24 train, 10 val, 3 test images."""
    folder = tmp_path_factory.mktemp("archives")
    make_sample(folder, classes=4, train_per_class=6, val=10, test=3)
    return folder


@pytest.fixture(scope="session")
def splits(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All splits of the miniature: train and val with boxes, test without labels."""
    folder = tmp_path_factory.mktemp("splits") / "shards"
    convert(archives, folder, workers=0)
    return folder


@pytest.fixture
def own(archives: Path, tmp_path: Path) -> Path:
    """A copy of the archives, to change."""
    return Path(shutil.copytree(archives, tmp_path / "archives"))


@pytest.fixture(scope="session")
def lmdb_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """204 training images of 4 classes in LMDB, in shards of ten to twenty."""
    folder = tmp_path_factory.mktemp("shards")
    make_sample(folder / "archives", classes=4, train_per_class=51, val=10, test=3)
    converted(folder / "archives", folder / "lmdb", shard_size=400_000)
    return folder / "lmdb"


@pytest.fixture(scope="session")
def hdf5_shards(lmdb_shards: Path) -> Path:
    """The same images in HDF5."""
    folder = lmdb_shards.parent / "hdf5"
    converted(lmdb_shards.parent / "archives", folder, shard_size=400_000, container="hdf5")
    return folder


@pytest.fixture(scope="module")
def server(buckets: Path) -> Iterator[int]:
    """The port of a server of S3 with the buckets in a folder."""
    with object_server(buckets) as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server, which is the endpoint of S3 in this test."""
    with faulty_proxy(server) as running:
        as_endpoint(running.url, monkeypatch)
        yield running
