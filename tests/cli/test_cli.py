"""The output of ``prep``: one line per error, exit codes, JSON and nothing else, no traceback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardprep import Flow, Loader
from shardprep.formats import (
    DatasetNotFound,
    inspect,
    open_collection,
    open_dataset,
    read_manifest,
    verify,
)
from support.datasets import converted, flip, prep, prep_here


def assert_one_line(text: str) -> None:
    assert len(text.strip().splitlines()) == 1, text
    assert "Traceback" not in text


@pytest.mark.slow
def test_convert_json_is_one_object_and_nothing_else(archives: Path, tmp_path: Path) -> None:
    done = prep("convert", archives, tmp_path / "out", "--split", "val", "--json", "--quiet", check=True)

    (split,) = json.loads(done.stdout)["splits"]
    assert split["records"] == 10
    assert split["root"].startswith("sha256:")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        ["convert"],
        ["convert", "/nowhere", "out"],
        ["convert", ".", "out", "--shard-size", "lots"],
        ["convert", ".", "out", "--shard-size", "9" * 400 + "GB"],
        ["convert", ".", "out", "--shard-size", "9" * 5000],
        ["convert", ".", "out", "--order", "other"],
        ["convert", ".", "out", "--seed", "-1"],
        ["convert", ".", "out", "--workers", "9" * 20],
        ["verify", ".", "--level", "deep"],
        ["inspect", "/dev/null"],
        ["nonsense"],
        ["sample", "out", "--classes", "0"],
        ["sample", "out", "--classes", "1001"],
    ],
)
def test_wrong_usage_is_2(words: list[str], tmp_path: Path) -> None:
    done = prep_here(*words, cwd=tmp_path)

    assert done.returncode == 2
    assert_one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "opens", [open_dataset, open_collection, read_manifest, verify, inspect, Loader, Flow.from_dataset]
)
def test_a_missing_dataset_is_an_error_of_its_own_and_one_of_python(opens: Any, tmp_path: Path) -> None:
    (tmp_path / "Train").mkdir()
    arguments = {"batch_size": 1} if opens is Loader else {}

    with pytest.raises(DatasetNotFound, match=r"did you mean '.*/Train'") as caught:
        opens(tmp_path / "train", **arguments)

    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.errno, caught.value.filename) == (2, str(tmp_path / "train"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("pyarrow", "parquet", "export {} out --to parquet"),
        ("obstore", "remote", "fetch file://{} out"),
        ("distributed", "dask", "convert {} out --cluster tcp://127.0.0.1:1"),
        ("ray", "ray", "convert {} out --cluster auto"),
    ],
)
def test_a_missing_extra_is_3_and_the_command_that_installs_it_is_named(
    package: str, extra: str, words: str, archives: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset, split="train")
    program = (
        f"import sys; sys.modules[{package!r}] = None; from shardprep.cli.app import run; "
        f"sys.exit(run({words.format(dataset)!r}.split()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 3
    assert_one_line(done.stderr)
    assert f"which is not installed: pip install 'shardprep[{extra}]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [20, 60, 110, 140, 240])
def test_too_little_memory_to_load_a_library_is_3(megabytes: int, archives: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset, split="train")
    command = f"ulimit -v {megabytes}000; exec {sys.executable} -m shardprep.cli verify {dataset} --level decode --json"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)

    assert done.returncode == 3
    assert_one_line(done.stderr)
    assert "cannot be loaded" in done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 3


@pytest.mark.slow
def test_damage_is_1_and_named(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "train")
    victim = sorted((tmp_path / "train").glob("shard-*"))[0]
    flip(victim, 5000)

    done = prep("verify", tmp_path / "train")

    assert done.returncode == 1
    assert victim.name in done.stdout


@pytest.mark.torture
def test_a_file_size_limit_is_3_and_resumable(archives: Path, tmp_path: Path) -> None:
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--shard-size", "100K", "--quiet"]

    done = prep(*words, prefix=["prlimit", "--fsize=60000"])

    assert done.returncode == 3
    assert_one_line(done.stderr)
    assert "ulimit -f" in done.stderr
    prep(*words, check=True)


@pytest.mark.torture
def test_the_demo_does_all_of_it(tmp_path: Path) -> None:
    done = prep("demo", tmp_path / "demo", check=True)

    assert done.stdout.count("$ prep") >= 6
    assert (tmp_path / "demo" / "lmdb" / "train" / "manifest.json").exists()
    assert (tmp_path / "demo" / "hdf5" / "val" / "manifest.json").exists()


@pytest.mark.torture
def test_prep_alone_lists_the_commands() -> None:
    assert prep().stdout.startswith("Usage: prep")
