"""What from-tensorpack.md says to write instead of each of tensorpack's names does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import convert
from support import tensorpack_data_checks, tensorpack_running_checks
from support.datasets import unpack
from support.repository import ROOT
from support.tensorpack_checks import checks_in
from support.tensorpack_page import ENTRIES, PAGE, PREAMBLE, WHOLE, Entry, anchor_of, started

NAMES = re.findall(
    r"\w+",
    """
    DataFlow BatchData MapData MapDataComponent AugmentImageComponent LocallyShuffleData MultiProcessRunner
    MultiProcessRunnerZMQ MultiThreadRunner MultiThreadMapData MultiProcessMapData MultiProcessMapDataZMQ
    MultiProcessMapAndBatchData MultiProcessMapAndBatchDataZMQ LMDBSerializer NumpySerializer TFRecordSerializer
    HDF5Serializer LMDBData LMDBDataPoint HDF5Data ILSVRC12 ILSVRC12Files RepeatedData RepeatedDataPoint
    FixedSizeData ConcatData JoinData RandomChooseData RandomMixData CacheData SelectComponent TestDataSpeed
    PrintData FakeData DataFromList DataFromGenerator BatchDataByShape send_dataflow_zmq RemoteDataZMQ FeedInput
    QueueInput BatchQueueInput StagingInput DummyConstantInput TensorInput ZMQInput TFDatasetInput
    dataflow_to_dataset PlaceholderInput EnqueueThread
    PrefetchData PrefetchDataZMQ MultiProcessPrefetchData MultiThreadPrefetchData ThreadedMapData DataFromIterable
""",
)
CHECKS = checks_in(tensorpack_data_checks, tensorpack_running_checks)


@pytest.fixture(scope="module")
def place(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's rows speak of."""
    folder = tmp_path_factory.mktemp("place")
    unpack(archives, folder / "imagenet")
    convert(archives, folder / "lmdb", workers=0)
    return folder


@pytest.fixture(scope="module")
def preamble() -> dict[str, Any]:
    return started(PREAMBLE)


def parameter(entry: Entry) -> Any:
    """A row of the page; those with processes take long."""
    name = entry.names[0]
    processes = name.startswith("MultiProcess")
    return pytest.param(entry, id=name, marks=pytest.mark.torture if processes else pytest.mark.slow)


@pytest.mark.parametrize("entry", [parameter(entry) for entry in ENTRIES])
def test_what_to_write_instead_does_what_the_page_says(
    entry: Entry, place: Path, preamble: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    dict(CHECKS)[entry.names[0]](entry.run(dict(preamble)))


def test_every_name_has_a_row_and_every_row_one_check() -> None:
    named = {part for entry in ENTRIES for name in entry.names for part in (name, name.partition(".")[0])}
    assert set(NAMES) <= named
    assert sorted(row for row, _ in CHECKS) == sorted(entry.names[0] for entry in ENTRIES)
    assert all(entry.expressions or entry.section for entry in ENTRIES)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http).*?)\)", PAGE))))
def test_every_link_leads_somewhere(link: str) -> None:
    path, _, anchor = link.partition("#")
    file = ROOT / "docs/training" / (path or "from-tensorpack.md")
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
    assert not anchor or anchor in map(anchor_of, headings)


def test_every_program_is_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(programs) == 2 + len({entry.section for entry in ENTRIES if entry.section})


@pytest.mark.slow
def test_the_whole_pipeline_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names = started(WHOLE)
    assert names["images"].shape == (8, 64, 64, 3)
    assert len(names["train"]) == 3
