import io
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import official_words
from shardprep.formats.sources.sample import Oddity, SamplePlan, make_sample
from support.sample_reading import (
    COUNTS,
    DEVKIT,
    TEST,
    TRAIN,
    TRAIN_BOXES,
    VAL,
    VAL_BOXES,
    Sample,
    content,
    ground_truth,
    members,
)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample.make(tmp_path_factory.mktemp("sample") / "new" / "folder")


def in_child(code: str, **environment: str) -> subprocess.Popen[bytes]:
    imports = "from pathlib import Path\nfrom shardprep.formats.sources.sample import make_sample\n"
    return subprocess.Popen([sys.executable, "-c", imports + code], env={**os.environ, **environment})


def test_the_summary_lists_the_files_that_are_there(sample: Sample) -> None:
    sizes = {name: len(data) for name, data in content(sample.folder).items()}
    assert {file.name: file.size for file in sample.summary.files} == sizes
    assert set(sizes) == {TRAIN, VAL, TEST, DEVKIT, TRAIN_BOXES, VAL_BOXES}
    assert sample.summary.images == {"train": 80, "val": 30, "test": 7}


def test_train_is_a_tar_of_padded_class_tars(sample: Sample) -> None:
    tars = members(sample.folder / TRAIN)
    assert list(tars) == sorted(f"{wnid}.tar" for wnid in sample.summary.wnids)
    assert {len(tar) % 10_240 for tar in (*tars.values(), content(sample.folder)[TRAIN])} == {0}


def test_train_images_are_numbered_with_gaps_and_without_leading_zeros(sample: Sample) -> None:
    folders, wnids, numbers = zip(*(key.replace("/", "_").split("_") for key in sample.train), strict=True)
    assert folders == wnids
    assert set(Counter(wnids).values()) == {8}
    assert all(number == str(int(number)) for number in numbers)
    assert len({len(number) for number in numbers}) > 1
    assert all(int(b) - int(a) != 1 for a, b in itertools.pairwise(numbers))


@pytest.mark.parametrize(
    ("archive", "prefix", "count"), [(VAL, "ILSVRC2012_val", 30), (TEST, "test/ILSVRC2012_test", 7)]
)
def test_flat_archives_are_complete_but_not_in_the_order_of_names(
    sample: Sample, archive: str, prefix: str, count: int
) -> None:
    names = list(members(sample.folder / archive))
    assert sorted(names) == [f"{prefix}_{i:08d}.JPEG" for i in range(1, count + 1)]
    assert names != sorted(names)
    assert (sample.folder / archive).stat().st_size % 10_240 == 0


def test_the_leaves_of_meta_mat_are_the_classes_in_an_order_of_their_own(sample: Sample) -> None:
    leaves = [row for row in sample.synsets if row[4] == 0]
    wnids = sample.summary.wnids
    assert [row[0] for row in leaves] == list(range(1, 11))
    assert tuple(row[1] for row in leaves) == wnids != tuple(sorted(wnids))
    assert [row[2] for row in leaves] == [official_words()[wnid] for wnid in wnids]
    assert {row[1]: row[7] for row in leaves} == Counter(key[:9] for key in sample.train)
    assert all(row[6] == 0 and np.size(row[5]) == 0 for row in leaves)


def test_the_other_synsets_of_meta_mat_have_children_and_no_images(sample: Sample) -> None:
    rows = sample.synsets
    inner = rows[len(sample.summary.wnids) :]
    children = sorted(int(child) for row in inner for child in np.atleast_1d(row[5]))
    assert all(row[4] == np.size(row[5]) > 0 and row[7] == 0 and row[6] > 0 for row in inner)
    assert children == list(range(1, len(rows)))  # each except the root is a child


def test_the_ground_truth_is_even_and_agrees_with_what_was_drawn(sample: Sample) -> None:
    truth = ground_truth(sample.folder)
    assert set(Counter(truth).values()) == {3}
    assert truth == [image.label + 1 for image in SamplePlan(**COUNTS, seed=0).val_images()]


def test_members_have_no_owner_and_no_time_of_their_own(sample: Sample) -> None:
    packed = content(sample.folder)[DEVKIT]
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        owners = {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in tar}
    assert owners == {(0, 0, "", "", 1_341_360_000)}
    assert packed[3:8] == bytes(5)  # gzip's file name and time


@pytest.mark.torture
def test_the_same_arguments_give_the_same_bytes_in_another_process(sample: Sample, tmp_path: Path) -> None:
    code = f"make_sample(Path({str(tmp_path)!r}), **{COUNTS})"
    with in_child(code, TZ="Asia/Tokyo", PYTHONHASHSEED="7") as child:
        assert child.wait() == 0
    assert content(tmp_path) == content(sample.folder)


def test_another_seed_gives_another_sample(sample: Sample, tmp_path: Path) -> None:
    other = make_sample(tmp_path, **COUNTS, seed=1)
    made, others = content(sample.folder), content(tmp_path)
    assert other.wnids != sample.summary.wnids
    assert [name for name in made if made[name] == others[name]] == []


def test_asking_for_more_leaves_the_first_images_as_they_were(sample: Sample, tmp_path: Path) -> None:
    make_sample(tmp_path, classes=10, train_per_class=9, val=1, test=1)
    more = Sample(tmp_path, sample.summary).train
    assert len(more) == 90
    assert sample.train.items() < more.items()


def test_the_smallest_sample_has_one_of_each(tmp_path: Path) -> None:
    summary = make_sample(tmp_path, classes=1, train_per_class=1, val=1, test=1)
    archives = (TRAIN, VAL, TEST, TRAIN_BOXES, VAL_BOXES)
    assert [len(members(tmp_path / archive)) for archive in archives] == [1] * 5
    assert [(oddity.kind, oddity.file) for oddity in summary.oddities] == [(Oddity.PNG, TRAIN)]
    assert ground_truth(tmp_path) == [1]


@pytest.mark.parametrize("wrong", [{name: 0} for name in COUNTS] + [{"classes": 1001}, {"seed": -1}])
def test_impossible_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} is "):
        make_sample(tmp_path / "new", **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [TRAIN, VAL_BOXES])
def test_archives_that_are_there_are_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageError, match=f"{name}: exists already"):
        make_sample(tmp_path, classes=1, train_per_class=1, val=1)
    assert content(tmp_path) == {name: b"precious"}


def test_a_file_in_place_of_the_folder_is_the_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_sample(tmp_path / "file", classes=1, train_per_class=1, val=1)


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_archive(tmp_path: Path) -> None:
    code = f"""
import errno, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
try:
    make_sample(Path({str(tmp_path)!r}), classes=2, train_per_class=2, val=60)
except OSError as error:
    raise SystemExit(42 if error.errno == errno.EFBIG else 1)
"""
    with in_child(code) as child:
        assert child.wait() == 42
    assert list(content(tmp_path)) == [TRAIN]
    assert len(members(tmp_path / TRAIN)) == 2


@pytest.mark.slow
def test_a_kill_leaves_no_half_archive_and_the_next_run_no_trace_of_it(tmp_path: Path) -> None:
    partial = tmp_path / f"{VAL}.partial"
    with in_child(f"make_sample(Path({str(tmp_path)!r}), train_per_class=1, val=5000)") as child:
        while not (partial.exists() and partial.stat().st_size) and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert set(content(tmp_path)) == {TRAIN, partial.name}
    assert len(members(tmp_path / TRAIN)) == 10

    (tmp_path / TRAIN).unlink()
    summary = make_sample(tmp_path, train_per_class=1, val=4)
    assert set(content(tmp_path)) == {file.name for file in summary.files}


def test_opencv_is_loaded_only_when_it_is_needed() -> None:
    with in_child("import sys; raise SystemExit('cv2' in sys.modules)") as child:
        assert child.wait() == 0


def test_the_number_of_threads_of_opencv_is_as_it_was(tmp_path: Path) -> None:
    before = cv2.getNumThreads()
    make_sample(tmp_path, classes=1, train_per_class=1, val=1, test=1)
    assert cv2.getNumThreads() == before
