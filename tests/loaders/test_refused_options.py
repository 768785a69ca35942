"""Options that cannot be meant are errors at once, wherever something is made, and name what is wrong."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardprep
from shardprep.formats import convert, fetch, find, open_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import ArraySpec, ColorJitter, Cut, EvalTransform, FakeData, Flow
from shardprep.loaders.batches.slots import SlotLayout
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.frames import FrameReceiver, send_batches
from shardprep.loaders.machines.keys import make_keys
from shardprep.loaders.measuring.disk import measure_disk
from shardprep.loaders.order.epoch import EpochPlan, LocalShuffle
from shardprep.loaders.order.parts import WeightedParts
from shardprep.loaders.remote import RemoteSource, serve
from shardprep.loaders.transforms.transforms import TrainTransform
from shardprep.loaders.transforms.views import Views
from support.column_datasets import write_columns
from support.cut_datasets import collected
from support.engine_workers import Writing, layout
from support.image_files import PHOTOGRAPHS
from support.loaded import loader_on
from support.loader_workers import nothing
from support.remote_ends import ANY_PORT, numbers

Options = dict[str, Any]
LOCAL = "tcp://127.0.0.1"
Refusal = tuple[Options, str]
"""Options, and what the error says of them."""


def each_of(**values: tuple[Any, ...]) -> list[Refusal]:
    """Each value as the only option that is given; the error has the name of the option."""
    return [({name: value}, name) for name, wrong in values.items() for value in wrong]


def in_plan(**options: Any) -> EpochPlan:
    """The plan of the last of ``world_size`` ranks."""
    shuffle = LocalShuffle(24, partitions=4)
    given = {"shard_counts": (13, 5, 0, 20, 2, 31, 9), "shuffle": shuffle, "batch_size": 4} | options
    return EpochPlan("sha256:abc", seed=7, drop_last=False, rank=given["world_size"] - 1, **given)


CROP, RECEIPT = TrainTransform(8), shardprep.Receipt("sha256:abc", 0)


LOADER = [
    *each_of(
        batch_size=(0, 1 << 70, 32.0, np.array([1, 2]), int),
        seed=("0", -1, 1 << 64),
        workers=(-1, 4097, "many", 1.5),
        slots=(2,),
        deadline=(0, "5"),
        read_ahead=(-1, "64MiB", 64e6),
        on_bad_record=("ignore",),
        drop_last=("False", None),
        with_numbers=("no",),
        records=([0.5, 1.0], [[1], [2]], [[1], [2, 3]], "7", {1, 2}, 7, [True] * 10),
        classes=("n01440764", 3),
    ),
    ({"batch_size": 205}, r"204 records has no batch with batch_size=.*drop_last=True.*--keep-last"),
    ({"batch_size": 103, "rank": 0, "world_size": 2}, "204 records has no batch"),
    ({"drop_last": False, "rank": 0, "world_size": 205}, "204 records has no batch.*; use fewer ranks$"),
    *(({"shuffle": wrong}, "LocalShuffle") for wrong in (True, 1000)),
    *(({"labels": wrong}, "unknown label space") for wrong in ("wordnet", ["sorted_wnid0"])),
    ({"rank": 1}, "set both or neither"),
    ({"rank": 2, "world_size": 2}, "rank"),
    *(({"transform": wrong}, "callable") for wrong in (TrainTransform, 5, "train", lambda one: one.image)),
    *(({name: [3, 5, 3]}, f"{name}= has 3 more than once") for name in ("records", "without")),
    *(({"records": [0, wrong]}, f"has {wrong}; record numbers .* are 0 to 203") for wrong in (-1, 204)),
    ({"records": np.ma.array([True] * 204, mask=True)}, "a masked array; fill it"),
    *(({"records": none, "without": []}, "select no record") for none in ([], [False] * 204)),
    ({"records": [0], "classes": []}, "select no record"),
    ({"classes": ["dog"]}, r"no class 'dog'; .* labels \(sorted_wnid0\) are 0 to 3"),
    *(({"classes": [wrong]}, "no class") for wrong in (4, -1, [1], True)),
    ({"without": [204]}, "without= has 204; record numbers"),
    *(({name: ["no key", "a"]}, f"{name}= has the key 'no key', which") for name in ("records", "without")),
    *(({"records": [1, 2], "without": own}, "leaves out all records") for own in ([1, 2], [True] * 204)),
    ({"without": [1.5]}, "not an array of float64"),
    ({"without": [1], "gaps": "open"}, "gaps must be 'close' or 'keep', not 'open'"),
    ({"without": [1], "shuffle": LocalShuffle(40, partitions=2)}, 'use gaps="keep"'),
]
TRANSFORM = [
    *each_of(
        size=(0, (64, 0), (64,), (64, 64.5), "224", 22.4, True),
        layout=("NWHC",),
        dtype=("float64", ["uint8"]),
        std=((1, 1, 0), (255, 255, 255)),
        mean=(0.5, (124, 116, 104)),
        interpolation=("nearest",),
        orientation=("upright",),
        ratio=((2, 1), (1,), 1),
        scale=((0, 1), (0.5, 2), 0.5, (0.1, 0.5, 1)),
        flip=("no", 0.5),
        color_jitter=({"brightness": 0.4}, True),
        lighting=(-0.1, "0.1", (0.1,)),
        masks=(5, "mask"),
        boxes=(5,),
        box_labels=("labels",),
    ),
    *(({"boxes": "boxes", "max_boxes": wrong}, "max_boxes") for wrong in (0, 2.5)),
    *(({"boxes": "boxes", "min_box": wrong}, "min_box") for wrong in (1.5, "0.1")),
    ({"boxes": "boxes", "box_units": "mm"}, "box_units"),
    ({"boxes": "boxes", "masks": ("box_count",)}, "different names"),
    *(({"masks": wrong}, "different names") for wrong in (("mask", "mask"), ("image",))),
]
VIEWS = (
    [],
    {},
    {"": CROP},
    {"none": []},
    {1: CROP},
    CROP,
    "TrainTransform",
    [nothing],
    [TrainTransform],
    [Views([CROP])],
    {"a": [CROP, TrainTransform(9)]},
    {"a": TrainTransform(8, masks=("mask",)), "a_mask": CROP},
)
LATE = {"color_jitter": ColorJitter(), "lighting": 0.1, "masks": ("m",), "boxes": "b", "orientation": "apply"}
CUT = (EvalTransform(8), TrainTransform, "cut", *(TrainTransform(8, **{name: LATE[name]}) for name in LATE))
WEIGHTS = [
    (0.5, "a dict with one number for each of a, b"),
    ({"a": 1}, "one number for each of a, b"),
    ({"a": 1, "b": 1, "c": 1}, "one number for each of a, b"),
    ({"a": 1, "b": 0}, "weight of b must be a number above 0, not 0"),
    *(({"a": wrong, "b": 1}, "weight of a") for wrong in (-1.0, 10**400, math.nan, math.inf, True, "1")),
    ({"a": 1e9, "b": 1}, "no place in an epoch for b, which has 20"),
]
PARTITIONS = [
    *(({"world_size": ranks}, "world_size that divides the number of partitions") for ranks in (3, 6)),
    ({"world_size": 2, "batch_size": 5}, "use a multiple of 2"),
    ({"world_size": 1, "batch_size": 2}, "use a multiple of 4"),
    *(({"world_size": 1, "shard_counts": (n,)}, f"{n} records are too few for 4") for n in (1, 3)),
]
LIMITS, WRONG = ("much", -1, 0, 1e9, True), (0, 1.5, "1")
FRAMES = each_of(
    endpoint=("inproc://here", "127.0.0.1:80", None), senders=WRONG, high_water_mark=WRONG, limit_bytes=LIMITS
)
NAMES = [({"name": wrong}, "1 to 256") for wrong in ("", "x" * 257, 3)]
ENDS = [
    *each_of(ahead=WRONG, insecure=("False",), keys=({}, "a.key")),
    *(({"endpoint": wrong}, "an endpoint is") for wrong in ("udp://x", f"{LOCAL}:-1", f"{LOCAL}:9/", None)),
    ({"endpoint": f"{LOCAL}:99999"}, "65535"),
]
ORDERED = each_of(lease_seconds=(0, "5"), limit_bytes=LIMITS, ordered=("no",), expected=([1],))
RECEIVED = [*ORDERED, ({"endpoint": []}, "at least one")]
SERVED = [*each_of(patience=(-1, math.nan, "5")), *NAMES, *each_of(identity=("",))]
FAKE = each_of(
    batch_size=(0,), size=((0, 4), 4, (4, 4, 3)), seconds=(-1.0, math.inf), seed=(-1, 1 << 64), batches=(-1,)
)
DECLARING = partial(nothing)
DECLARING.outputs = 5  # type: ignore[attr-defined]
OUTSIDE = ((-1, 0, 2, 2), (0, -1, 2, 2), (0, 0, 0, 3), (0, 0, 3, 0), (498, 0, 3, 1), (0, 498, 1, 3))
ALONE = [({name: value}, "a map with processes") for name, value in (("deadline", 1), ("outputs", ()))]
ALONE += [({"threads": 2, "processes": 2}, "a number for one of them")]
TWO_FIELDS = (ArraySpec("a", (), "u1"), ArraySpec("a", (), "i8"))

MADE: list[tuple[Callable[..., object], list[Refusal]]] = [
    (TrainTransform, TRANSFORM),
    (EvalTransform, [({"size": 64, "resize": 8}, "resize, at least the size, .*, 64 to 4096, not 8")]),
    (Views, [({"transforms": wrong}, "[Vv]iew|callable") for wrong in VIEWS]),
    (Cut, [({"transform": wrong}, "Cut takes a TrainTransform") for wrong in CUT]),
    (LocalShuffle, each_of(window=(0, -1, True, "2 gigs", "GiB", "-1GiB", "0MB", ""))),
    (partial(LocalShuffle, 10), each_of(partitions=(0, -1, 1.5, "2", None))),
    (in_plan, PARTITIONS),
    (
        partial(WeightedParts.of, names=["a", "b"], records=[10, 20]),
        [({"weights": w}, s) for w, s in WEIGHTS],
    ),
    (partial(FakeData, batches=1, batch_size=1), [*FAKE, *each_of(classes=(0,), encoded=("no",))]),
    (partial(FrameReceiver, endpoint=ANY_PORT), FRAMES),
    (partial(FrameReceiver, ANY_PORT), [({"senders": 2, "bind": False}, "bind"), *each_of(bind=("no",))]),
    (partial(send_batches, [1], ANY_PORT), [*NAMES, *each_of(timeout=(-1, math.nan))]),
    (partial(shardprep.measure, None), each_of(seconds=(-1, math.nan))),
    (partial(serve, numbers(Path()), endpoint=f"{LOCAL}:9"), [*SERVED, *ENDS]),
    (partial(RemoteSource, endpoint=ANY_PORT), [*RECEIVED, *ENDS]),
    (
        partial(measure_disk, Path()),
        [({"seconds": -1}, "seconds, 0 or more, not -1"), ({"record_bytes": 0}, "record_bytes.*not 0")],
    ),
    (
        partial(Engine, Writing(), layout(4), workers=1),
        each_of(workers=(-1,), slots=(2, None), deadline=(0, "1")),
    ),
    (SlotLayout, [({"rows": 1, "fields": TWO_FIELDS}, "same name")]),
    (open_dataset, [({"path": wrong}, "a path is needed here") for wrong in ("", "a\0b", None, 5, b"lmdb")]),
    (partial(convert, "archives"), [({"output": None}, "a path is needed here")]),
    (partial(convert, "a", "b"), each_of(options=(shardprep.PlanOptions(),), progress=(True,))),
    (partial(shardprep.convert_part, "a", "b"), each_of(part=("1/3", (1,), (1.0, 3), 3))),
    (partial(fetch, folder="copy"), [({"url": None}, "is not a URL")]),
    (partial(find, "lmdb"), [({"images": 5}, "a list of paths"), ({"images": [], "near": "no"}, "near")]),
    (partial(shardprep.gate, "lmdb"), [({"limits": one}, "limits must be a dict") for one in (None, ["a"])]),
    (partial(shardprep.gate, "lmdb", {}), each_of(canaries=("no",))),
    (partial(Flow.from_dataset, "lmdb"), each_of(with_keys=("no",))),
    (partial(Flow.from_files, "."), each_of(suffixes=(".jpg", 5))),
    (shardprep.PlanOptions, each_of(decode_check=("no",), crop_ready=("no",))),
    (shardprep.ConvertOptions, each_of(restart=("no",), allow_partial=("no",))),
    (shardprep.SourceOptions, each_of(follow_symlinks=("no",), skip_non_images=("no",))),
    (partial(make_keys, "name"), each_of(overwrite=("False",))),
    (shardprep.decode_rgb, [({"image": "photo.jpg"}, "read_bytes.*not 'photo.jpg'")]),
    (shardprep.read_image_header, [({"image": "photo.jpg"}, "read_bytes.*not 'photo.jpg'")]),
    (partial(shardprep.decode_rgb, b""), each_of(crop=((0, 0, 1, 1.0), (0, 0, 1)))),
    (
        partial(shardprep.decode_rgb, PHOTOGRAPHS[0].read_bytes()),
        [({"crop": crop}, "not within 500x500 pixels") for crop in OUTSIDE],
    ),
    (shardprep.open_collection, [({"path": "."}, "is not a collection")]),
    (shardprep.Field.from_json, [({"value": {"kind": "int"}}, "a column's name .*: None")]),
    (RECEIPT.check, each_of(records=("0", 0.0))),
    (partial(RECEIPT.check, 0), each_of(left_out=("0",), skipped=(0.0,), omitted=(-1,))),
    (shardprep.tracing, [({"loader": [1]}, "takes a Loader, not list")]),
    (numbers(Path()).map, [({"function": None}, "a function is needed here")]),
    (partial(numbers(Path()).map, abs), ALONE),
    (numbers(Path()).cache().in_process, [({}, "put it after in_process")]),
    (numbers(Path()).repeat().save, [({"output": "x"}, "an infinite flow cannot be saved")]),
    (numbers(Path()).transform, [({"transform": DECLARING}, "must be a tuple of ArraySpec, not 5")]),
    (partial(send_batches, endpoint=ANY_PORT), [({"batches": b}, "batches come from") for b in (5, "x", {})]),
    (partial(numbers(Path()).map_component, abs, 0), each_of(random=("no",))),
    (partial(numbers(Path()).batch, 2), each_of(as_list=("no",))),
]


@pytest.mark.parametrize(("options", "says"), LOADER)
def test_options_of_a_loader_that_cannot_be_meant_are_refused(
    options: Options, says: str, lmdb_shards: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        loader_on(lmdb_shards, **({"drop_last": True} | options))


def test_a_dataset_is_not_read_in_search_of_record_numbers(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as found, pytest.raises(UsageError, match="not a Dataset"):
        loader_on(lmdb_shards, records=found)


def test_a_key_is_no_record_number_but_the_index_has_the_numbers_of_keys(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        key = dataset[5].key
        assert (dataset.index["key"] == key.encode()).nonzero()[0].tolist() == [5]
        with pytest.raises(TypeError, match=rf"by number, not '{key}'; of a key: .dataset.index\["):
            dataset[key]  # type: ignore[index]


def test_a_number_of_workers_is_a_whole_number(lmdb_shards: Path) -> None:
    calls = (shardprep.verify, partial(find, images=PHOTOGRAPHS), shardprep.report)
    for call, workers in product(calls, ("2", -1, 1.5)):
        with pytest.raises(UsageError, match="workers must be a whole number"):
            call(lmdb_shards, workers=workers)


def test_numbers_of_epochs_steps_and_records_are_whole_ones(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        calls: list[Any] = [loader.key, loader.parting, loader.shuffle_quality, partial(loader.replay, 0)]
        calls += [lambda n: loader.replay(0, 0, start=n), lambda n: loader.show_batch(most=n)]
        for call, wrong in product(calls, ("5", -1, 1.5)):
            with pytest.raises(UsageError, match=r"must be a whole number|compares two Loaders"):
                call(wrong)


def test_gaps_cannot_close_where_parts_have_weights(lmdb_shards: Path, tmp_path: Path) -> None:
    path, weights = collected(lmdb_shards, tmp_path / "cut", 2), {"part-0": 1.0, "part-1": 3.0}
    with pytest.raises(UsageError, match="not possible with weights"):
        loader_on(path, without=[1], weights=weights)


def test_columns_and_classes_that_a_dataset_does_not_have_are_refused(tmp_path: Path) -> None:
    shardprep.write_dataset([{"age": 5}], tmp_path / "unlabelled")
    with pytest.raises(UsageError, match="the dataset has no classes"):
        loader_on(tmp_path / "unlabelled", classes=["a"])
    write_columns(tmp_path / "d")
    for columns, says in (
        *((wrong, "must be a list of names") for wrong in ("age", 5)),
        (["depth"], "unknown or repeated column 'depth'; choose from image, mask"),
        (["age", "age"], "repeated column 'age'"),
        ([], "empty"),
    ):
        with pytest.raises(UsageError, match=says):
            loader_on(tmp_path / "d", columns=columns)
    for wrong, says in ((["a=b.csv"], "{'NAME': FILE}, not .*a=b"), ({"a": np.eye(9)}, "a path is needed")):
        with pytest.raises(UsageError, match=says):
            shardprep.join(tmp_path / "d", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "options", "says"), [(make, *refusal) for make, refusals in MADE for refusal in refusals]
)
def test_options_that_cannot_be_meant_are_refused_where_a_thing_is_made(
    make: Callable[..., object], options: Options, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        make(**options)
