"""Facts about the rows of from-tensorpack.md: sources, files, items, batches and their order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from shardprep.formats import open_dataset
from shardprep.loaders import Flow
from support.saved_items import are_same
from support.tensorpack_checks import ALL, FIRST_50, assert_shuffled, in_eights, labels_of, of, rows_of
from support.tensorpack_page import Ran

# Sources


@of("DataFlow")
def any_class_is_a_source(ran: Ran) -> None:
    expected = [(number, number**2) for number in ALL]
    for name in ("squares", "unsized", "table", "elsewhere"):
        with ran.names[name] as flow:
            found = [(int(array[0]), square) for array, square in flow]
        assert (found == expected) is (name in ("squares", "unsized"))
        assert sorted(found) == expected
    assert [len(ran.names[name]) for name in ("squares", "table")] == [100, 100]


@of("DataFromList")
def a_list_is_shuffled(ran: Ran) -> None:
    assert_shuffled(ran.value, ALL)


@of("DataFromIterable")
def an_iterable_comes_in_order(ran: Ran) -> None:
    assert labels_of(ran.value) == labels_of(ran.value) == ALL


@of("DataFromGenerator")
def a_generator_function_is_called_for_each_pass(ran: Ran) -> None:
    assert list(ran.value) == list(ran.value) == [[n, n * n] for n in ALL]
    assert str(ran.value.length) == "unknown"
    assert len(list(ran.value.batch(32))) == 4


@of("FakeData")
def fake_items_have_the_size(ran: Ran) -> None:
    fake, own = ran.values
    image, label = fake.peek()[0]
    assert (len(fake), image.shape, image.dtype, type(label)) == (1000, (224, 224, 3), np.uint8, int)
    assert labels_of(own) == [0] * 1000


@of("ILSVRC12Files")
def files_come_with_the_labels_of_their_folders(ran: Ran) -> None:
    one, other = list(ran.value), list(ran.value)
    assert Counter(label for _, label in one) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert sorted(one) == sorted(other) != one != other
    folders = sorted(Path("imagenet/train").iterdir())
    assert all(image in [file.read_bytes() for file in folders[label].iterdir()] for image, label in one)


@of("ILSVRCMeta")
def files_in_one_folder_have_the_labels_of_a_list(ran: Ran) -> None:
    with open_dataset("lmdb/val") as val:
        in_order = sorted(val, key=lambda record: record.key)
        assert list(ran.names["ds"]) == [(bytes(record.image), record.label) for record in in_order]


@of("ILSVRC12")
def images_are_decoded(ran: Ran) -> None:
    files = list(Flow.from_files("imagenet/train", seed=0))
    assert [label for _, label in ran.value] == [label for _, label in files]
    for (image, _), (encoded, _) in zip(ran.value.at_pass(0), files, strict=True):
        assert np.array_equal(image, ran.names["decode_rgb"](encoded))


# Files


@of("LMDBSerializer.save", "TFRecordSerializer.save", "NumpySerializer.save", "HDF5Serializer.save")
def saved_items_come_back(ran: Ran) -> None:
    manifest, flow = ran.values
    assert manifest.records == len(flow) == 100
    assert labels_of(flow) == ALL
    assert all(are_same(one, other) for one, other in zip(flow, ran.names["ds"], strict=True))


@of("LMDBDataPoint")
def a_dataset_is_shuffled(ran: Ran) -> None:
    passes = [[(bytes(image), label) for image, label in ran.value] for _ in range(2)]
    with open_dataset("lmdb/train") as dataset:
        assert sorted(passes[0]) == sorted((bytes(record.image), record.label) for record in dataset)
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]
    assert len(list(ran.value.zip(Flow.from_dataset("lmdb/train")))) == len(ran.value)  # two of one file


@of("LMDBData")
def a_dataset_has_keys(ran: Ran) -> None:
    with open_dataset("lmdb/train") as dataset:
        assert [(key, label) for key, _, label in ran.value] == [(each.key, each.label) for each in dataset]
    with open_dataset("lmdb/val") as dataset:
        images = [bytes(each.image) for each in dataset]
    pairs = list(ran.names["ds"])
    assert pairs == list(ran.names["ds"])
    assert [key for key, _ in pairs] == [number.to_bytes(8, "big") for number in range(len(images))]
    assert all(value.endswith(image) for (_, value), image in zip(pairs, images, strict=True))


@of("HDF5Data")
def rows_are_read(ran: Ran) -> None:
    assert labels_of(ran.names["ds"]) == ALL
    assert_shuffled(ran.names["ds"].shuffle(100), ALL)
    ran.names["file"].close()


# Each item


@of("MapData")
def items_are_mapped_and_left_out(ran: Ran) -> None:
    mapped, *some = ran.values
    assert labels_of(mapped, scale=255) == ALL
    for flow in some:
        assert labels_of(flow) == ALL[1::2]
        assert str(flow.length) == "at most 100"


@of("MapDataComponent")
def one_component_is_mapped(ran: Ran) -> None:
    assert labels_of(ran.value, scale=255) == ALL
    assert type(ran.value.peek()[0]) is tuple
    assert ran.names["ds"].map_component(lambda image: None, 0).peek()[0][0] is None


def turned(flow: Flow, number: int) -> list[bool]:
    """The images of a pass that are flipped."""
    return [image.strides[1] < 0 for image, _ in flow.at_pass(number)]


@of("AugmentImageComponent")
def images_are_augmented_at_random(ran: Ran) -> None:
    assert labels_of(ran.value) == ALL
    assert turned(ran.value, 0) == turned(ran.value, 0) != turned(ran.value, 1)
    assert 20 < sum(turned(ran.value, 0)) < 80


@of("AugmentImageComponents")
def whole_items_are_augmented_at_random(ran: Ran) -> None:
    images_are_augmented_at_random(ran)


@of("SelectComponent")
def components_are_selected(ran: Ran) -> None:
    assert labels_of((image, label) for label, image in ran.value) == ALL


# Batches


@of("BatchData")
def the_last_batch_is_dropped_kept_or_padded(ran: Ran) -> None:
    dropped, kept, padded, listed, filled = ran.values
    assert rows_of(dropped) == in_eights(ALL)[:-1]
    assert rows_of(kept) == in_eights(ALL)
    *_, (_, labels, mask) = padded
    assert (labels.tolist(), mask.tolist()) == ([*ALL[-4:], 0, 0, 0, 0], [True] * 4 + [False] * 4)
    assert labels.dtype == np.int64
    assert all(type(part) is list for batch in listed for part in batch)
    assert rows_of(listed) == rows_of(filled) == in_eights(ALL)
    ragged = Flow.from_iterable([(np.ones(n % 3), n) for n in range(16)]).batch(8, as_list=True).pad()
    assert [array.sum(axis=1).tolist() for array, _ in ragged] == [
        [n % 3 for n in range(8)],
        [n % 3 for n in range(8, 16)],
    ]


@of("BatchData.aggregate_batch")
def batches_are_made_by_a_function(ran: Ran) -> None:
    assert rows_of(ran.value) == in_eights(ALL)
    assert ran.value.peek()[0][1].dtype == np.int32


@of("BatchDataByShape")
def shapes_are_batched_apart(ran: Ran) -> None:
    assert rows_of(ran.value) == in_eights(ALL)
    mixed = Flow.from_iterable([np.zeros(n % 3) for n in range(20)]).batch_by_shape(8)
    assert sorted(batch.shape for batch in mixed) == [(6, 2), (7, 0), (7, 1)]


# Order and number


@of("LocallyShuffleData")
def items_move_within_the_window(ran: Ran) -> None:
    assert_shuffled(ran.value, ALL)
    assert all(abs(place - label) < 45 for place, label in enumerate(labels_of(ran.value)))


@of("num_reuse")
def items_are_shuffled_twice_each(ran: Ran) -> None:
    one, other = labels_of(ran.value), labels_of(ran.value)
    assert sorted(one) == sorted(other) == sorted(ALL * 2)
    assert one != other


@of("shuffle_interval")
def there_is_no_interval(ran: Ran) -> None:
    items_move_within_the_window(ran)


@of("itertools.islice")
def items_are_skipped(ran: Ran) -> None:
    assert labels_of(ran.value) == labels_of(ran.value) == ALL[20:]
    assert len(ran.value) == 80


@of("RepeatedData")
def passes_are_repeated(ran: Ran) -> None:
    twice, endless = ran.values
    assert labels_of(twice) == ALL * 2
    assert labels_of(endless.take(250)) == (ALL * 3)[:250]
    assert endless.length.is_infinite


@of("RepeatedDataPoint")
def items_are_repeated(ran: Ran) -> None:
    assert labels_of(ran.value) == [label for label in ALL for _ in range(3)]
    assert str(ran.value.length) == "unknown"


@of("FixedSizeData")
def passes_have_a_size(ran: Ran) -> None:
    going_on, anew = ran.values
    assert [labels_of(going_on) for _ in range(4)] == [ALL[:32], ALL[32:64], ALL[64:96], ALL[96:] + ALL[:28]]
    assert [labels_of(anew) for _ in range(2)] == [ALL[:32]] * 2
    assert len(anew) == 32


@of("ConcatData")
def flows_follow_each_other(ran: Ran) -> None:
    assert labels_of(ran.value) == ALL + FIRST_50


@of("JoinData")
def flows_are_joined(ran: Ran) -> None:
    assert [(a, b) for _, a, _, b in ran.value] == list(zip(FIRST_50, FIRST_50, strict=True))
    assert len(ran.names["ds"].zip(ran.names["ds"])) == 100


@of("RandomChooseData")
def a_flow_is_chosen_for_each_item(ran: Ran) -> None:
    found = Counter(labels_of(ran.value))
    assert set(found.values()) == {1, 2}
    assert 50 < found.total() < 150


@of("RandomMixData")
def flows_are_mixed(ran: Ran) -> None:
    assert_shuffled(ran.value, sorted(ALL + FIRST_50))


@of("CacheData")
def items_are_cached(ran: Ran) -> None:
    drawn: list[int] = []
    cached = ran.names["ds"].map(lambda item: drawn.append(item[1]) or item).cache()
    assert labels_of(cached) == labels_of(cached) == drawn == ALL
    assert not cached.peek()[0][0].flags.writeable
    assert labels_of(cached.take(100)) == ALL
    assert len(drawn) == 200
    assert labels_of(ran.values[0]) == ALL
    assert_shuffled(ran.values[1], ALL)
