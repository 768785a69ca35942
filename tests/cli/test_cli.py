"""The output of ``prep``: one line per error, exit codes, JSON and nothing else, no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardprep import Flow, Loader
from shardprep.cli.app import cli
from shardprep.formats import (
    DatasetNotFound,
    inspect,
    open_collection,
    open_dataset,
    read_manifest,
    verify,
)
from support.datasets import converted, flip, prep, prep_here, tree
from support.image_files import encoded, pixels
from support.sampling import torture_except
from support.source_builders import write


def assert_one_line(text: str) -> None:
    assert len(text.strip().splitlines()) == 1, text
    assert "Traceback" not in text


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_has_help(command: str) -> None:
    done = prep_here(command, "--help")

    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: prep {command}")


@pytest.mark.slow
def test_convert_says_what_it_made(archives: Path, tmp_path: Path) -> None:
    done = prep("convert", archives, tmp_path / "out", "--workers", "2", "--quiet", check=True)

    assert "official-tars" in done.stdout or "official" in done.stdout
    assert done.stdout.count("root ") == 6  # content_root and root of three splits
    assert done.stderr == ""


@pytest.mark.slow
def test_convert_json_is_one_object_and_nothing_else(archives: Path, tmp_path: Path) -> None:
    done = prep("convert", archives, tmp_path / "out", "--split", "val", "--json", "--quiet", check=True)

    (split,) = json.loads(done.stdout)["splits"]
    assert split["records"] == 10
    assert split["root"].startswith("sha256:")
    assert done.stderr == ""


@pytest.mark.slow
def test_inspect_prints_the_same_figures_as_text_and_json(archives: Path, tmp_path: Path) -> None:
    manifest = converted(archives, tmp_path / "train")

    text = prep("inspect", tmp_path / "train", check=True).stdout
    summary = json.loads(prep("inspect", tmp_path / "train", "--json", check=True).stdout)

    assert summary["records"] == manifest.records
    assert manifest.root == summary["root"]
    assert manifest.root in text
    assert "shuffled, seed 0" in text
    assert summary["kinds"]["PNG"] == 1
    assert summary["oddities"]["CMYK"] == 1


@pytest.mark.torture
def test_inspect_counts_images_of_extreme_aspect(tmp_path: Path) -> None:
    for at, shape in enumerate([(40, 640, 3), (40, 641, 3), (641, 40, 3)]):
        write(tmp_path / "source" / "class" / f"{at}.jpg", encoded(pixels(*shape)))
    converted(tmp_path / "source", tmp_path / "train")

    text = prep("inspect", tmp_path / "train", check=True).stdout
    summary = json.loads(prep("inspect", tmp_path / "train", "--json", check=True).stdout)

    assert "oddities      2 over 16:1\n" in text
    assert summary["oddities"]["over 16:1"] == 2


def test_inspect_of_an_unlabelled_split(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "test", split="test")

    assert "no labels" in prep("inspect", tmp_path / "test", check=True).stdout


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
    "words",
    [
        "verify {}",
        "inspect {}",
        "repair {} --source .",
        "report {} -o r.html",
        "export {} out --to mds",
        "replay {}",
    ],
)
def test_a_missing_dataset_is_3_and_the_folder_that_was_meant_is_named(words: str, tmp_path: Path) -> None:
    (tmp_path / "shards/train").mkdir(parents=True)
    (tmp_path / "images").mkdir()

    near, far = (prep_here(*words.format(path).split(), cwd=tmp_path) for path in ("shard/trian", "/nowhere"))

    assert (near.returncode, far.returncode) == (3, 3)
    assert near.stderr == "prep: shard/trian: there is no such folder; did you mean 'shards/train'?\n"
    assert far.stderr == "prep: /nowhere: there is no such folder\n"


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


def test_wrong_usage_names_the_help() -> None:
    done = prep("convert")

    assert done.returncode == 2
    assert done.stderr == "prep: Missing argument 'SOURCE'. (see prep convert --help)\n"


def test_a_source_that_is_nothing_known_is_2(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()

    done = prep("convert", tmp_path / "source", tmp_path / "out")

    assert done.returncode == 2
    assert_one_line(done.stderr)


@pytest.mark.slow
def test_damage_is_1_and_named(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "train")
    victim = sorted((tmp_path / "train").glob("shard-*"))[0]
    flip(victim, 5000)

    done = prep("verify", tmp_path / "train")

    assert done.returncode == 1
    assert victim.name in done.stdout


@pytest.mark.slow
def test_what_cannot_be_written_is_3(archives: Path, tmp_path: Path) -> None:
    done = prep("convert", archives, "/proc/shards", "--quiet")

    assert done.returncode == 3
    assert_one_line(done.stderr)


@pytest.mark.torture
def test_a_file_size_limit_is_3_and_resumable(archives: Path, tmp_path: Path) -> None:
    words = ["convert", archives, tmp_path / "out", "--split", "val", "--shard-size", "100K", "--quiet"]

    done = prep(*words, prefix=["prlimit", "--fsize=60000"])

    assert done.returncode == 3
    assert_one_line(done.stderr)
    assert "ulimit -f" in done.stderr
    prep(*words, check=True)


@pytest.mark.torture
@pytest.mark.parametrize(
    ("number", "code"), torture_except([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGINT, 130))
)
def test_an_interruption_ends_all_at_once_and_is_resumable(
    archives: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    words = ["convert", str(archives), str(out), "--split", "train", "--shard-size", "1", "--workers", "2"]
    words.append("--quiet")
    process = subprocess.Popen(
        [sys.executable, "-m", "shardprep.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(out.glob("shard-*")) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == code
    assert_one_line(errors)
    assert not processes_of_group(process.pid)
    prep(*words, check=True)
    converted(archives, tmp_path / "whole", shard_size=1)
    assert tree(out) == tree(tmp_path / "whole")


def processes_of_group(group: int) -> list[int]:
    """The processes of a group that are still running after a moment."""
    deadline = time.monotonic() + 5
    while found := [pid for pid in map(int, numbers_in_proc()) if is_of_group(pid, group)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def numbers_in_proc() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def is_of_group(pid: int, group: int) -> bool:
    """Whether a process is of that group, and is not a zombie."""
    try:
        state, _, its_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(its_group) == group and state not in "ZX"


@pytest.mark.torture
def test_the_demo_does_all_of_it(tmp_path: Path) -> None:
    done = prep("demo", tmp_path / "demo", check=True)

    assert done.stdout.count("$ prep") >= 6
    assert (tmp_path / "demo" / "lmdb" / "train" / "manifest.json").exists()
    assert (tmp_path / "demo" / "hdf5" / "val" / "manifest.json").exists()


@pytest.mark.torture
def test_prep_alone_lists_the_commands() -> None:
    assert prep().stdout.startswith("Usage: prep")
