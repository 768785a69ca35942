"""The plan: a pure function of listing and options."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import ConvertOptions, DryRun, ShardprepError, SourceOptions, convert, plan_conversion
from shardprep.formats.conversion.plan import Plan, PlanOptions, make_plan
from shardprep.formats.errors import UsageError
from shardprep.formats.records.record import ORDERS, LabelSpace, permutation
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.sources.source import Listing, entry_dtype
from support.column_sources import write_pictures
from support.datasets import converted, prep_here, tree
from support.image_files import encoded, pixels
from support.sampling import torture_except
from support.source_builders import write

Entry = tuple[str, int, int]  # key, label, length
CLASSES = LabelSpace.of(["n1", "n2", "n3"])


def listing(entries: Iterable[Entry], **change: Any) -> Listing:
    rows = [(key.encode(), b"", label, length, 0, 0) for key, label, length in entries]
    key_bytes = max((len(row[0]) for row in rows), default=1)
    made = Listing("train", "folders", np.array(rows, entry_dtype(key_bytes, 1)), CLASSES, Mock())
    return replace(made, **change)


def plan_of(entries: Iterable[Entry], **options: Any) -> Plan:
    return make_plan(listing(entries), PlanOptions(**options))


ENTRIES = [(f"n{1 + i // 4}/{i:02}", i // 4, 100 + i) for i in range(12)]

entry_lists = st.lists(
    st.tuples(st.text("abc/é", min_size=1, max_size=6), st.integers(-1, 2), st.integers(0, 50)),
    unique_by=lambda entry: entry[0],
    min_size=1,
    max_size=40,
)
options = st.builds(
    PlanOptions,
    container=st.sampled_from(["lmdb", "hdf5"]),
    shard_size=st.integers(1, 300),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(deadline=None)
@given(entry_lists, options)
def test_every_entry_is_in_one_shard_and_none_is_too_large(
    entries: list[Entry], options: PlanOptions
) -> None:
    made = make_plan(listing(entries), options)
    assert sorted(made.order) == list(range(len(entries)))
    bounds = [(shard.first, shard.last) for shard in made.shards]
    assert [0, *(last for _, last in bounds)] == [*(first for first, _ in bounds), len(entries)]
    for shard in made.shards:
        lengths = made.entries_of(shard)["length"]
        assert (shard.records, shard.size) == (len(lengths), lengths.sum())
        assert lengths.sum() <= options.shard_size or len(lengths) == 1
    for shard, following in zip(made.shards, made.shards[1:], strict=False):
        assert shard.size + made.entries_of(following)["length"][0] > options.shard_size


def test_the_permutation_of_a_seed_and_the_digest_of_a_plan_never_change() -> None:
    assert permutation(10, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(5, (1 << 64) - 1).tolist() == [0, 4, 2, 3, 1]
    plans = [make_plan(listing(ENTRIES), PlanOptions(), version=(1, minor)) for minor in (0, 1)]
    assert [plan.digest[7:23] for plan in plans] == ["995b7a74ae2b1446", "27ee84f5d62a906b"]


DIFFERENCES: dict[str, Plan] = {
    "container": plan_of(ENTRIES, container="hdf5"),
    "shard size": plan_of(ENTRIES, shard_size=500),
    "order": plan_of(ENTRIES, order="key"),
    "seed": plan_of(ENTRIES, seed=1),
    "policy": plan_of(ENTRIES, on_bad_image="skip"),
    "split": make_plan(listing(ENTRIES, split="val"), PlanOptions()),
    "classes": make_plan(listing(ENTRIES, labels=LabelSpace.of(["n1", "n2", "n4"])), PlanOptions()),
    "a key": plan_of([("n1/xx", 0, 100), *ENTRIES[1:]]),
    "a longer key": plan_of([("n1/000", 0, 100), *ENTRIES[1:]]),
    "a label": plan_of([("n1/00", 1, 100), *ENTRIES[1:]]),
    "a length": plan_of([("n1/00", 0, 101), *ENTRIES[1:]]),
    "one fewer": plan_of(ENTRIES[1:]),
    "one more": plan_of([*ENTRIES, ("n9/1", 2, 1)]),
}


def test_the_digest_differs_for_every_difference() -> None:
    digests = {made.digest for made in DIFFERENCES.values()} | {plan_of(ENTRIES).digest}
    assert len(digests) == len(DIFFERENCES) + 1
    assert plan_of(ENTRIES, seed=np.int64(1)).digest == DIFFERENCES["seed"].digest


def test_an_empty_listing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no images of the split train"):
        plan_of([])


@pytest.mark.parametrize(
    "wrong",
    [
        {"container": "zip"},
        {"order": "none"},
        {"on_bad_image": "warn"},
        {"shard_size": 0},
        {"shard_size": (4 << 30) + 1},
        *({"seed": seed} for seed in (-1, 1 << 64)),
        *({"quality": quality} for quality in (0, 101, 50)),  # 50 of no shorter side
        *({"shorter_side": side} for side in (0, 224.5)),
        {"container": "tar"},
        {"order": "archive"},
        {"container": "tar", "order": "archive", "crop_ready": True},
    ],
)
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"must (be|have) |cannot be re-encoded|only applies to images"):
        PlanOptions(**wrong)


ALL_OF_TRAIN = """
import re
import numpy as np
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.conversion.plan import PlanOptions, make_plan
from shardprep.formats.sources.source import Listing, entry_dtype

rows = np.zeros(1_281_167, entry_dtype(28, 0))
rows["label"] = np.arange(len(rows)) % 1000
rows["length"] = 50_000 + np.arange(len(rows)) % 120_000
for start in range(0, len(rows), 4096):
    some = rows[start : start + 4096]
    some["key"] = [b"n%08d/n%08d_%d" % (n % 1000, n % 1000, n) for n in range(start, start + len(some))]
made = make_plan(Listing("train", "", rows, LabelSpace(()), None), PlanOptions())
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]  # ru_maxrss counts the parent, too
print(len(made.shards), sum(shard.records for shard in made.shards), peak)
"""


@pytest.mark.torture
def test_all_of_ilsvrc12_is_planned_in_200_megabytes() -> None:
    command = [sys.executable, "-c", ALL_OF_TRAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)

    shards, records, peak_kib = map(int, done.stdout.split())
    assert (shards, records) == (520, 1_281_167)
    assert peak_kib * 1024 < 200_000_000


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_pictures(tmp_path / "photos" / split, [f"{('cat', 'dog')[n % 2]}/{n}.png" for n in range(6)])
    return tmp_path / "photos"


def dry_run(source: Path, output: Path, **arguments: Any) -> DryRun:
    arguments.setdefault("plan_options", PlanOptions(shard_size=300))
    return plan_conversion(source, output, **{"workers": 0, **arguments})


def said(planned: DryRun) -> list[str]:
    return [str(problem) for problem in planned.problems]


def test_it_says_what_the_conversion_makes_and_writes_nothing(archives: Path, tmp_path: Path) -> None:
    planned = dry_run(archives, tmp_path / "out", plan_options=PlanOptions(shard_size=60_000))
    assert [*tmp_path.iterdir()] == []
    done = convert(archives, tmp_path / "out", plan_options=PlanOptions(shard_size=60_000), workers=0)

    assert (said(planned), planned.exit_code) == ([], 0)
    assert [(s.path, s.images, s.image_bytes, s.shards, s.layout) for s in planned.splits] == [
        (d.path, d.manifest.records, d.manifest.image_bytes, len(d.manifest.shards), "official-tars")
        for d in done
    ]
    for split, one in zip(planned.splits, done, strict=True):
        assert sum(file.size for file in one.manifest.files) <= split.disk_bytes
    assert pickle.loads(pickle.dumps(done))[0].path == done[0].path  # noqa: S301 - made here
    assert planned.seconds
    assert planned.read_rate


@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_all_problems_of_all_splits_are_said_with_their_numbers(
    photos: Path, tmp_path: Path, workers: int
) -> None:
    for name in ("train/cat/0.png", "train/cat/2.png", "val/dog/1.png"):
        write(photos / name, b"no image")
    write(photos / "train/dog/1.png", (photos / "train/dog/3.png").read_bytes()[:-30])
    (photos / "val/bird").mkdir()
    (photos / "val/fish").mkdir()
    (photos / "train/dog/link.png").symlink_to("1.png")
    write(photos / "val/lost.png", b"x")

    planned = dry_run(photos, tmp_path / "out", workers=workers)

    link, lost, empty, *bad = said(planned)
    assert "link.png: is a symbolic link" in link
    assert "lost.png: is not in a class folder" in lost
    assert "bird: this class has no image; add some, or remove the folder (the first of 2)" in empty
    assert sorted(problem.count for problem in planned.problems) == [1, 1, 1, 2, 3]
    assert any("(the first of 3)" in one for one in bad)
    assert planned.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_bad_images_that_are_skipped_are_no_problem_unless_a_split_has_no_other(
    photos: Path, tmp_path: Path
) -> None:
    skip = PlanOptions(on_bad_image="skip")
    write(photos / "train/cat/0.png", b"no image")
    planned = dry_run(photos, tmp_path / "out", plan_options=skip)
    assert (said(planned), planned.exit_code) == ([], 0)
    assert [problem.count for problem in planned.skipped] == [1]
    assert [split.skipped for split in planned.splits] == [1, 0]

    for path in (photos / "val").rglob("*.png"):
        write(path, b"no image")

    assert said(dry_run(photos, tmp_path / "out", plan_options=skip)) == [
        f"{tmp_path}/out/val: the source has no intact image"
    ]
    with pytest.raises(ShardprepError, match="the source has no intact image"):
        converted(photos, tmp_path / "val", split="val", on_bad_image="skip")
    assert not (tmp_path / "val/manifest.json").exists()


def test_a_sample_of_many_images_is_named_and_the_estimate_is_of_all(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(photos / "train/cat/0.png", b"no image")
    monkeypatch.setattr("shardprep.formats.conversion.convert.perf_counter", count().__next__)
    monkeypatch.setattr("shardprep.formats.conversion.convert.SAMPLE_IMAGES", 2)
    everything, sample = (dry_run(photos, tmp_path / "out", images=which) for which in ("all", "sample"))
    words = ("convert", photos, tmp_path / "out", "--workers=0", "--shard-size=300")
    done = prep_here(*words, "--dry-run", "--check-images=all", "--json")

    assert all(2 <= split.checked < split.images == 6 for split in sample.splits)
    assert [replace(split, checked=6) for split in sample.splits] == [*everything.splits]
    assert 0.5 < (sample.seconds or 0) / (everything.seconds or 1) < 2  # each image takes a tick to read
    assert "of 6 images, a sample; --check-images all reads all" in prep_here(*words, "--dry-run").stdout
    assert [(p["count"], p["exit_code"]) for p in json.loads(done.stdout)["problems"]] == [(1, 1)]
    assert done.returncode == prep_here(*words).returncode == everything.exit_code == 1


REFUSED: dict[str, dict[str, Any]] = {
    "a split that is not there": {"split": "test"},
    "another plan": {"split": "train", "plan_options": PlanOptions(seed=1)},
    "a folder of splits into a dataset": {},
    "a fraction of a source with val": {"source_options": SourceOptions(val_fraction=0.1)},
    "a column of a folder of classes": {"source_options": SourceOptions(path_column="path")},
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_the_exit_code_is_that_of_the_conversion(
    arguments: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    converted(photos, tmp_path / "out", split="train")
    before = tree(tmp_path / "out")

    planned = dry_run(photos, tmp_path / "out", **arguments)

    with pytest.raises(ShardprepError) as caught:
        convert(photos, tmp_path / "out", **arguments, workers=0)
    assert planned.exit_code == caught.value.exit_code
    assert said(planned)[0] == str(caught.value)
    assert tree(tmp_path / "out") == before


def test_an_output_is_complete_or_unfinished_or_of_other_options(photos: Path, tmp_path: Path) -> None:
    converted(photos, tmp_path / "done", split="train")
    write(tmp_path / "out/.prep/plan.json", b'{"seed":7}\n')

    complete = dry_run(photos, tmp_path / "done", split="train", plan_options=PlanOptions(shard_size=60_000))
    other = dry_run(photos, tmp_path / "out", split="train")
    restarted = dry_run(photos, tmp_path / "out", split="train", options=ConvertOptions(restart=True))

    assert [split.already_complete for split in complete.splits] == [True]
    assert (complete.exit_code, complete.seconds) == (0, None)
    assert any("--seed was 7, is now 0" in problem for problem in said(other))
    assert said(restarted) == []


def test_files_that_are_gone_are_counted(photos: Path, tmp_path: Path) -> None:
    class Removing(NoProgress):
        """Progress that removes a class when its images are about to be read."""

        def task(self, title: str, *, records: int, size: int) -> Any:
            shutil.rmtree(photos / "val/cat", ignore_errors=True)
            return super().task(title, records=records, size=size)

    planned = dry_run(photos, tmp_path / "out", progress=Removing())

    assert [problem.count for problem in planned.problems] == [3]
    assert "changed while it was read" in said(planned)[0]


def test_a_class_of_val_without_an_image_in_train_is_named(photos: Path, tmp_path: Path) -> None:
    write(photos / "val" / "dogs/1.png", encoded(pixels(8, 8), ".png"))
    for run in (plan_conversion, convert):
        progress = Mock(wraps=NoProgress())

        run(photos, tmp_path / "out", workers=0, progress=progress)

        progress.note.assert_any_call("classes of val without an image in train: dogs")


@pytest.mark.parametrize(
    ("there", "match"),
    [
        ("out/train/manifest.json", r"is a folder of splits \(train\); give '.*out/val' with --split val"),
        ("out/train/.prep", r"is a folder of splits \(train\); give '.*out/val' with --split val"),
        ("out/manifest.json", "out: is itself a dataset, so splits cannot go into it; choose another output"),
        ("out", "out: is not a folder; choose another output"),
        ("", "out: is not a folder; choose another output"),
    ],
)
def test_a_folder_of_splits_and_a_file_are_no_outputs(
    there: str, match: str, photos: Path, tmp_path: Path
) -> None:
    if there:
        write(tmp_path / there, b"{}")
    else:
        (tmp_path / "out").symlink_to("nowhere")
    before = tree(tmp_path)

    with pytest.raises(UsageError, match=match):
        convert(photos, tmp_path / "out", split=None if "splits cannot" in match else "val", workers=0)

    assert tree(tmp_path) == before
