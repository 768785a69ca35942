"""The output of ``prep``: one line per error, exit codes, JSON and nothing else, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardprep import Flow, Loader
from shardprep.cli.app import cli, run
from shardprep.cli.console.options import make_transform
from shardprep.formats import DatasetNotFound, inspect, open_collection, open_dataset, read_manifest, verify
from shardprep.loaders import EvalTransform, GlobalShuffle
from shardprep.loaders.machines.keys import fingerprint, load_public, load_secret
from support.datasets import converted, prep_here


def assert_one_line(text: str) -> None:
    assert len(text.strip().splitlines()) == 1, text
    assert "Traceback" not in text


def test_prep_alone_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert capsys.readouterr().out.startswith("Usage: prep")


@pytest.mark.parametrize(
    "words",
    [
        ["convert"],
        ["convert", "/nowhere", "out"],
        ["convert", ".", "out", "--shard-size", "lots"],
        ["convert", ".", "out", "--shard-size", "9" * 400 + "GB"],
        ["convert", ".", "out", "--shard-size", "9" * 5000],
        ["convert", ".", "out", "--order", "other"],
        ["convert", ".", "out", "--part", "1/2", "--cluster", "tcp://127.0.0.1:1"],
        ["convert", ".", "out", "--seed", "-1"],
        ["convert", ".", "out", "--workers", "9" * 20],
        ["verify"],
        ["verify", ".", "--level", "deep"],
        ["verify", "--nonsense"],
        ["nonsense"],
        ["sample", "out", "--classes", "0"],
        ["sample", "out", "--classes", "1001"],
    ],
)
def test_wrong_usage_is_2_said_in_a_line_and_as_json(words: list[str], tmp_path: Path) -> None:
    for more in ([], ["--json"]):
        done = prep_here(*words, *more, cwd=tmp_path)

        assert done.returncode == 2
        assert_one_line(done.stderr)
        assert done.stderr.startswith("prep: ")
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    if not {"/nowhere", "--classes"} & {*words}:  # which are errors of what the command calls
        assert error["command"] == " ".join(["prep", *(word for word in words[:1] if word in cli.commands)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("convert . out --check-images all", "--check-images is only for --dry-run"),
        ("demo .", "is not empty; choose another folder"),
        ("find . image --run log", "is a folder of splits; --run needs one of them"),
        ("gate . --max leaks", "'leaks' is not NAME=N; names are damaged, leaks"),
        ("gate . --max-leaks few", "'few' is neither a number of records nor a share"),
        ("inspect s3://bucket/train --html page.html", "copy it with prep fetch"),
    ],
)
def test_options_that_do_not_go_together_are_named(line: str, says: str, splits: Path) -> None:
    done = prep_here(*line.split(), cwd=splits)

    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_the_names_of_crops_and_shuffles_mean_those_of_the_loader() -> None:
    assert make_transform("eval", 224) == EvalTransform(224, resize=256)
    words = ["shards", "--to=tcp://127.0.0.1:1", "--shuffle=global"]
    assert cli.commands["serve"].make_context("serve", words).params["shuffle"] == GlobalShuffle()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "there is not enough memory; use fewer --workers"),
        (ImportError("libx.so"), "cannot be loaded: libx.so"),
        (OSError(2, "", "train/x.npy"), "train/x.npy: is missing; prep repair rebuilds it"),
        (OSError(2, "No usable folder"), "No usable folder; set TMPDIR to a folder that can be written to"),
    ],
)
def test_a_lack_of_memory_or_of_files_and_folders_and_a_broken_library_are_3(
    error: Exception, says: str, splits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardprep.cli.commands.report.find_images", Mock(side_effect=error))
    done = prep_here("find", "train", "train/manifest.json", cwd=splits)
    assert (done.returncode, done.stderr) == (3, f"prep: {says}\n")


def test_an_option_without_its_value_is_one_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--level"]) == 2
    assert capsys.readouterr().err.endswith("requires an argument. (see prep verify --help)\n")


@pytest.mark.parametrize(
    "opens", [open_dataset, open_collection, read_manifest, verify, inspect, Loader, Flow.from_dataset]
)
def test_a_missing_dataset_is_an_error_of_its_own_and_one_of_python(opens: Any, tmp_path: Path) -> None:
    arguments = {"batch_size": 1} if opens is Loader else {}

    with pytest.raises(DatasetNotFound, match="there is no such folder; give the path") as caught:
        opens(tmp_path / "train", **arguments)

    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.errno, caught.value.filename) == (2, str(tmp_path / "train"))
    (tmp_path / "train").touch()
    with pytest.raises(DatasetNotFound, match="is not a folder"):
        opens(tmp_path / "train", **arguments)


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


def test_each_class_has_its_label_images_name_and_words(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as opened:
        classes = opened.manifest.labels.classes
        images = [int((opened.index["label"] == label).sum()) for label in range(len(classes))]

    head, *rows = prep_here("inspect", lmdb_shards, "--classes").stdout.splitlines()[-len(classes) - 1 :]
    assert head.split() == ["label", "images", "name", "words"]
    assert [row.split(maxsplit=3) for row in rows] == [
        [str(label), str(images[label]), found.name, found.words] for label, found in enumerate(classes)
    ]


def test_a_pair_of_keys_is_not_printed_and_is_kept_unless_forced(tmp_path: Path) -> None:
    made = prep_here("keygen", "data1", "--json", cwd=tmp_path)
    pair = {name: tmp_path / found for name, found in json.loads(made.stdout).items()}
    before = pair["secret"].read_bytes()
    refused = prep_here("keygen", "data1", cwd=tmp_path)

    assert pair["public"].name == "data1.key"
    assert pair["fingerprint"].name == fingerprint(load_public(pair["public"]))
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert_one_line(refused.stderr)
    assert pair["secret"].read_bytes() == before
    keys = [load_secret(pair["secret"])]
    forced = prep_here("keygen", "data1", "--force", cwd=tmp_path)
    keys.append(load_secret(pair["secret"]))
    assert keys[0].secret != keys[1].secret
    said = "".join(done.stdout + done.stderr for done in (made, refused, forced))
    assert not [key for pair in keys for key in (pair.secret, pair.public) if key.decode() in said]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_commands_and_datasets_by_the_line_in_the_documents(tmp_path: Path) -> None:
    program = tmp_path / "prep"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardprep "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(_PREP_COMPLETE=bash_source prep)"
COMP_WORDS=(prep repa) COMP_CWORD=1
_prep_completion prep
echo "${COMPREPLY[@]}"
complete -p prep
COMP_WORDS="prep verify sh" COMP_CWORD=2 _PREP_COMPLETE=bash_complete prep
"""

    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)

    command, function, folder = done.stdout.split("\n", 2)
    assert command == "repair", done.stderr
    assert "_prep_completion" in function
    assert folder.strip() == "dir,sh"


def test_records_without_images_are_not_called_images(tmp_path: Path) -> None:
    Flow.from_iterable([{"key": str(number), "age": number} for number in range(4)]).save(
        tmp_path / "items/train"
    )

    def first_line(*words: str) -> str:
        return prep_here(*words, cwd=tmp_path).stdout.splitlines()[0]

    assert first_line("verify", "items/train").startswith("items/train: intact: 4 records in 1 shard")
    assert "  bytes         0 B" not in prep_here("inspect", "items/train", cwd=tmp_path).stdout
    assert "\nitems: train: 4 records, " in prep_here("inspect", "items", cwd=tmp_path).stdout
    assert first_line("export", "items/train", "out", "--to=mds").startswith("out: 4 records without ")
    said = first_line("report", "items/train", "-o", "items.html")
    assert said == "items.html: items/train, records without images"
    assert "The records have no images." in (tmp_path / "items.html").read_text()
    assert "copy/train: 4 records without" in first_line("fetch", (tmp_path / "items").as_uri(), "copy")
    for option in ("--dry-run", "--workers=0"):
        assert first_line("convert", "items", "again", option).startswith(
            "again/train: 4 records without images or labels in 1 LMDB shard"
        )
