"""What from-tensorpack.md says to write instead of each of tensorpack's names does what it says."""

import io
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import convert, open_dataset
from shardprep.loaders import Flow
from shardprep.loaders.tf_inputs import QueueInput
from support.datasets import unpack
from support.process_table import children
from support.saved_items import are_same
from support.tensorpack_page import ENTRIES, PAGE, PREAMBLE, WHOLE, Entry, Ran, started
from support.tf_devices import tf

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
ALL, FIRST_50 = list(range(100)), list(range(50))  # the labels of the page's two flows
IN_EIGHTS = [ALL[first : first + 8] for first in range(0, 100, 8)]
Check = Callable[[Ran], None]


def labels_of(flow: Any, *, scale: float = 1) -> list[int]:
    """The labels, after checking that their images belong to them."""
    found = []
    for image, label in flow:
        assert image.shape == (8, 8, 3)
        assert np.allclose(np.asarray(image) * scale, label)
        found.append(int(label))
    return found


def rows_of(batches: Any, *, scale: float = 1) -> list[list[int]]:
    """The labels of each batch, with the same check."""
    return [labels_of(zip(*map(np.asarray, batch[:2]), strict=True), scale=scale) for batch in batches]


def both_passes(read: Callable[..., Any], expected: list[Any], *, scale: float = 1) -> Check:
    """Check what both passes of a flow, or of an input into TensorFlow, have."""

    def check(ran: Ran) -> None:
        with ran.value as flow:
            assert read(flow, scale=scale) == read(flow, scale=scale) == expected

    return check


labels = partial(both_passes, labels_of)
batches = partial(both_passes, rows_of, IN_EIGHTS)


def shuffled(expected: list[int]) -> Check:
    return lambda ran: assert_shuffled(ran.value, expected)


def assert_shuffled(flow: Flow, expected: list[int]) -> None:
    """Check that each pass has these items, in another order."""
    one, other = labels_of(flow), labels_of(flow)
    assert sorted(one) == sorted(other) == expected
    assert len({tuple(one), tuple(other), tuple(expected)}) == 3


def beside(count: int, whats: Callable[[], set[Any]], then: Check) -> Check:
    """Check that a pass has so many threads or processes more in its middle, and the rest."""

    def check(ran: Ran) -> None:
        before, items = whats(), iter(ran.values[0])
        next(items)
        assert len(whats() - before) == count
        del items
        then(ran)

    return check


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardprep")}


def any_class_is_a_source(ran: Ran) -> None:
    expected = [(number, number**2) for number in ALL]
    for name in ("squares", "unsized", "table", "elsewhere"):
        with ran.names[name] as flow:
            found = [(int(array[0]), square) for array, square in flow]
        assert (found == expected) is (name in ("squares", "unsized"))
        assert sorted(found) == expected


def a_generator_function_is_called_for_each_pass(ran: Ran) -> None:
    assert list(ran.value) == list(ran.value) == [[n, n * n] for n in ALL]
    assert len(list(ran.value.batch(32))) == 4


def fake_items_have_the_size(ran: Ran) -> None:
    fake, own = ran.values
    image, label = fake.peek()[0]
    assert (len(fake), image.shape, image.dtype, type(label)) == (1000, (224, 224, 3), np.uint8, int)
    assert labels_of(own) == [0] * 1000


def files_come_with_the_labels_of_their_folders(ran: Ran) -> None:
    one, other = list(ran.value), list(ran.value)
    assert Counter(label for _, label in one) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert sorted(one) == sorted(other) != one != other
    folders = sorted(Path("imagenet/train").iterdir())
    assert all(image in [file.read_bytes() for file in folders[label].iterdir()] for image, label in one)


def files_in_one_folder_have_the_labels_of_a_list(ran: Ran) -> None:
    with open_dataset("lmdb/val") as val:
        in_order = sorted(val, key=lambda record: record.key)
        assert list(ran.names["ds"]) == [(bytes(record.image), record.label) for record in in_order]


def images_are_decoded(ran: Ran) -> None:
    files = list(Flow.from_files("imagenet/train", seed=0))
    for (image, label), (encoded, expected) in zip(ran.value.at_pass(0), files, strict=True):
        assert label == expected
        assert np.array_equal(image, ran.names["decode_rgb"](encoded))


def saved_items_come_back(ran: Ran) -> None:
    manifest, flow = ran.values
    assert manifest.records == len(flow) == 100
    assert labels_of(flow) == ALL
    assert all(are_same(one, other) for one, other in zip(flow, ran.names["ds"], strict=True))


def a_dataset_is_shuffled(ran: Ran) -> None:
    passes = [[(bytes(image), label) for image, label in ran.value] for _ in range(2)]
    with open_dataset("lmdb/train") as dataset:
        assert sorted(passes[0]) == sorted((bytes(record.image), record.label) for record in dataset)
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]
    assert len(list(ran.value.zip(Flow.from_dataset("lmdb/train")))) == len(ran.value)  # two of one file


def a_dataset_has_keys(ran: Ran) -> None:
    with open_dataset("lmdb/train") as dataset:
        assert [(key, label) for key, _, label in ran.value] == [(each.key, each.label) for each in dataset]
    with open_dataset("lmdb/val") as dataset:
        images = [bytes(each.image) for each in dataset]
    pairs = list(ran.names["ds"])
    assert pairs == list(ran.names["ds"])
    assert [key for key, _ in pairs] == [number.to_bytes(8, "big") for number in range(len(images))]
    assert all(value.endswith(image) for (_, value), image in zip(pairs, images, strict=True))


def rows_are_read(ran: Ran) -> None:
    assert labels_of(ran.names["ds"]) == ALL
    assert_shuffled(ran.names["ds"].shuffle(100), ALL)
    ran.names["file"].close()


def items_are_mapped_and_left_out(ran: Ran) -> None:
    mapped, *some = ran.values
    assert labels_of(mapped, scale=255) == ALL
    assert [labels_of(flow) for flow in some] == [ALL[1::2]] * 2


def images_are_augmented_at_random(ran: Ran) -> None:
    assert labels_of(ran.value) == ALL
    one, again, other = ([image.strides[1] < 0 for image, _ in ran.value.at_pass(n)] for n in (0, 0, 1))
    assert one == again != other
    assert 20 < sum(one) < 80


def the_last_batch_is_dropped_kept_or_padded(ran: Ran) -> None:
    dropped, kept, padded, listed, filled = ran.values
    assert rows_of(dropped) == IN_EIGHTS[:12]
    assert rows_of(kept) == rows_of(listed) == rows_of(filled) == IN_EIGHTS
    *_, (images, labels, mask) = padded
    assert mask.tolist() == [True] * 4 + [False] * 4
    assert labels[:4].tolist() == ALL[96:]
    assert not np.any(images[4:])


def items_move_within_the_window(ran: Ran) -> None:
    assert_shuffled(ran.value, ALL)
    assert all(abs(place - label) < 45 for place, label in enumerate(labels_of(ran.value)))


def passes_are_repeated(ran: Ran) -> None:
    twice, endless = ran.values
    assert labels_of(twice) == ALL * 2
    assert labels_of(endless.take(250)) == (ALL * 3)[:250]


def passes_have_a_size(ran: Ran) -> None:
    going_on, anew = ran.values
    assert [labels_of(going_on) for _ in range(4)] == [ALL[:32], ALL[32:64], ALL[64:96], ALL[96:] + ALL[:28]]
    assert [labels_of(anew) for _ in range(2)] == [ALL[:32]] * 2


def flows_are_joined(ran: Ran) -> None:
    assert [(a, b) for _, a, _, b in ran.value] == list(zip(FIRST_50, FIRST_50, strict=True))


def a_flow_is_chosen_for_each_item(ran: Ran) -> None:
    found = Counter(labels_of(ran.value))
    assert set(found.values()) == {1, 2}
    assert 50 < found.total() < 150


def items_are_cached(ran: Ran) -> None:
    drawn: list[int] = []
    cached = ran.names["ds"].map(lambda item: drawn.append(item[1]) or item).cache()
    assert labels_of(cached) == labels_of(cached) == drawn == ALL
    assert labels_of(ran.values[0]) == ALL
    assert_shuffled(ran.values[1], ALL)


def threads_map_each_item_once(ran: Ran) -> None:
    ordered, unordered = ran.values
    for _ in range(2):
        assert labels_of(ordered, scale=255) == ALL
        assert sorted(labels_of(unordered, scale=255)) == ALL


def batches_come_from_another_machine_once(ran: Ran) -> None:
    here = ran.names["ds"].shuffle(100).batch(8)
    assert ran.names["epochs"] == [rows_of(here), rows_of(here)]


def speed_is_measured(ran: Ran) -> None:
    assert ran.value.items_per_second > 0
    assert "items/s" in str(ran.value)


def two_items_are_printed(ran: Ran) -> None:
    with redirect_stderr(io.StringIO()) as said:
        assert labels_of(ran.value) == ALL
    lines = [line[:16] for line in said.getvalue().splitlines() if "pass" in line]
    assert lines == ["Item 0 of pass 0", "Item 1 of pass 0"]


def placeholders_are_fed(ran: Ran) -> None:
    assert ran.names["images"].op.type == "Placeholder"
    assert np.allclose(ran.names["means"], [np.mean(labels) for labels in IN_EIGHTS])


def constants_are_zeros(ran: Ran) -> None:
    with ran.value as each:
        assert each.dequeue().shape == (8, 8, 8, 3)
        assert not np.any(each.dequeue())


def tensors_are_made(ran: Ran) -> None:
    with ran.value as each:
        assert [tensor.shape for tensor in each] == [(8, 8, 8, 3)] * 10


def batches_come_from_another_process(ran: Ran) -> None:
    assert ran.names["labels"] == IN_EIGHTS


def a_dataset_is_an_input(ran: Ran) -> None:
    with ran.value as each:
        assert [int(number) for _ in range(2) for number in each] == [*range(10)] * 2


def a_flow_is_a_dataset(ran: Ran) -> None:
    assert rows_of(ran.value) == rows_of(ran.value) == IN_EIGHTS
    assert ran.value.element_spec[0] == tf.TensorSpec([None, 8, 8, 3], tf.uint8)


def the_queue_tells_how_full_it_is(ran: Ran) -> None:
    assert (ran.value.capacity, ran.value.batches) == (2, 0)
    with QueueInput(ran.names["batches"]) as each:
        list(each)
        stats = each.stats()
    assert stats.batches == 13
    assert 0 <= stats.mean_level <= stats.capacity
    assert 0 <= min(stats.starved, stats.blocked) <= max(stats.starved, stats.blocked) <= 1


CHECKS: dict[str, Check] = {
    "DataFlow": any_class_is_a_source,
    "DataFromList": shuffled(ALL),
    "DataFromIterable": labels(ALL),
    "DataFromGenerator": a_generator_function_is_called_for_each_pass,
    "FakeData": fake_items_have_the_size,
    "ILSVRC12Files": files_come_with_the_labels_of_their_folders,
    "ILSVRCMeta": files_in_one_folder_have_the_labels_of_a_list,
    "ILSVRC12": images_are_decoded,
    "LMDBSerializer.save": saved_items_come_back,
    "LMDBDataPoint": a_dataset_is_shuffled,
    "LMDBData": a_dataset_has_keys,
    "TFRecordSerializer.save": saved_items_come_back,
    "NumpySerializer.save": saved_items_come_back,
    "HDF5Serializer.save": saved_items_come_back,
    "HDF5Data": rows_are_read,
    "MapData": items_are_mapped_and_left_out,
    "MapDataComponent": labels(ALL, scale=255),
    "AugmentImageComponent": images_are_augmented_at_random,
    "AugmentImageComponents": images_are_augmented_at_random,
    "SelectComponent": lambda ran: labels(ALL)(Ran([ran.value.select(1, 0)], ran.names)),
    "BatchData": the_last_batch_is_dropped_kept_or_padded,
    "BatchData.aggregate_batch": batches(),
    "BatchDataByShape": batches(),
    "LocallyShuffleData": items_move_within_the_window,
    "num_reuse": shuffled(sorted(ALL * 2)),
    "shuffle_interval": items_move_within_the_window,
    "itertools.islice": labels(ALL[20:]),
    "RepeatedData": passes_are_repeated,
    "RepeatedDataPoint": labels([label for label in ALL for _ in range(3)]),
    "FixedSizeData": passes_have_a_size,
    "ConcatData": labels(ALL + FIRST_50),
    "JoinData": flows_are_joined,
    "RandomChooseData": a_flow_is_chosen_for_each_item,
    "RandomMixData": shuffled(sorted(ALL + FIRST_50)),
    "CacheData": items_are_cached,
    "MultiProcessRunnerZMQ": beside(1, children, labels(ALL)),
    "MultiThreadRunner": beside(1, own_threads, labels(ALL)),
    "MultiThreadMapData": beside(4, own_threads, threads_map_each_item_once),
    "MultiProcessMapData": beside(2, children, labels(ALL, scale=255)),
    "MultiProcessMapAndBatchData": beside(2, children, batches(scale=255)),
    "MultiProcessMapDataComponentSharedArray": batches(scale=255),
    "send_dataflow_zmq": batches_come_from_another_machine_once,
    "TestDataSpeed": speed_is_measured,
    "PrintData": two_items_are_printed,
    "PlaceholderInput": placeholders_are_fed,
    "FeedInput": batches(),
    "QueueInput": batches(),
    "BatchQueueInput": batches(),
    "StagingInput": batches(),
    "DummyConstantInput": constants_are_zeros,
    "TensorInput": tensors_are_made,
    "ZMQInput": batches_come_from_another_process,
    "TFDatasetInput": a_dataset_is_an_input,
    "dataflow_to_dataset": a_flow_is_a_dataset,
    "EnqueueThread": the_queue_tells_how_full_it_is,
}
"""The check of each row, by the first name in it."""


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
    CHECKS[entry.names[0]](entry.run(dict(preamble)))


def test_every_name_has_a_row_and_every_row_a_check_and_a_program_that_is_run() -> None:
    named = {part for entry in ENTRIES for name in entry.names for part in (name, name.partition(".")[0])}
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert set(NAMES) <= named
    assert sorted(CHECKS) == sorted(entry.names[0] for entry in ENTRIES)
    assert all(entry.expressions or entry.section for entry in ENTRIES)
    assert len(programs) == 2 + len({entry.section for entry in ENTRIES if entry.section})


@pytest.mark.slow
def test_the_whole_pipeline_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names = started(WHOLE)
    assert names["images"].shape == (8, 64, 64, 3)
    assert len(names["train"]) == 3
