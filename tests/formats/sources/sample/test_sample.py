import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.sample import make_sample

COUNTS = {"classes": 10, "train_per_class": 8, "val": 30, "test": 7}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_child(code: str, **environment: str) -> subprocess.Popen[bytes]:
    imports = "from pathlib import Path\nfrom shardprep.formats.sources.sample import make_sample\n"
    return subprocess.Popen([sys.executable, "-c", imports + code], env={**os.environ, **environment})


@pytest.mark.torture
def test_the_same_arguments_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    make_sample(tmp_path / "new" / "folder", **COUNTS)
    code = f"make_sample(Path({str(tmp_path / 'other')!r}), **{COUNTS})"
    with in_child(code, TZ="Asia/Tokyo", PYTHONHASHSEED="7") as child:
        assert child.wait() == 0
    assert content(tmp_path / "other") == content(tmp_path / "new" / "folder")


@pytest.mark.parametrize("wrong", [{name: 0} for name in COUNTS] + [{"classes": 1001}, {"seed": -1}])
def test_impossible_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} is "):
        make_sample(tmp_path / "new", **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_bbox_val_v3.tgz"])
def test_archives_that_are_there_are_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageError, match=f"{name}: exists already"):
        make_sample(tmp_path, classes=1, train_per_class=1, val=1)
    assert content(tmp_path) == {name: b"precious"}


def test_what_a_killed_run_left_is_overwritten_and_archives_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar.partial").write_bytes(b"half")

    made = make_sample(tmp_path, classes=1, train_per_class=1, val=1, test=1)

    assert content(tmp_path).keys() == {file.name for file in made.files}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in tmp_path.iterdir())
