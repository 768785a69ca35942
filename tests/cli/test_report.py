"""``prep report`` writes a page, says what it found, and prints all of it as JSON."""

import json
import re
from pathlib import Path

import pytest

from shardprep import Loader
from shardprep.formats import collect, open_dataset, report
from shardprep.formats.runtime.files import hash_file
from shardprep.formats.shards.read import Shard
from support.datasets import prep_here


@pytest.fixture(scope="module")
def folder(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert prep_here("convert", archives, folder / "shards", "--quiet", "--workers", 0).returncode == 0
    return folder


def test_the_page_of_a_dataset_is_written_where_it_is_wanted_also_by_inspect(folder: Path) -> None:
    words = ("report", "shards/train", "--against", "shards/val", "-o", "a.html", "--workers", 1)
    (folder / "index.npy").touch()  # of another program
    done = prep_here(*words, cwd=folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a.html: shards/train, 34 of 34 images examined\n")
    made = (folder / "a.html").read_text()
    again = report(folder / "shards/train", folder / "b.html", against=folder / "shards/val")
    assert made == again.to_html().replace(str(folder / "shards"), "shards")
    assert [path.name for path in folder.glob("*.tmp")] == []
    prep_here("report", "shards/val", "-o", "one.html", "--quiet", cwd=folder)
    inspected = prep_here("inspect", "shards/val", "--html", "two.html", cwd=folder)
    assert inspected.stdout.endswith("page: two.html\n")
    assert (folder / "one.html").read_bytes() == (folder / "two.html").read_bytes()


def test_an_output_in_a_dataset_or_a_missing_folder_is_refused_before_the_work(folder: Path) -> None:
    for words in ("report -o", "gate --junit", "inspect --html", "bench-disk --save"):
        for place, code, said in (("shards/val/x", 2, "folder of a dataset"), ("no/x", 3, "does not exist")):
            command, option = words.split()
            done = prep_here(command, "shards/val", option, place, cwd=folder)
            assert (done.returncode, done.stdout) == (code, "")
            assert re.fullmatch(f"prep: {place}: .*{said}.*\n", done.stderr)
    twice = prep_here("report", "shards", "-o", "x", "--save-findings", "./x", cwd=folder)
    assert (twice.returncode, twice.stderr) == (2, "prep: x: is the path of two outputs; give each its own\n")


def test_the_record_numbers_of_findings_are_saved_for_each_split(folder: Path) -> None:
    words = ("report", "shards", "--against", "shards/val", "-o", "all.html", "--pixels", "none")
    assert "record numbers: f-val.json" in prep_here(*words, "--save-findings", "f.json", cwd=folder).stdout
    for name in ("train", "val", "test"):
        found = json.loads((folder / f"f-{name}.json").read_text())
        with Loader(folder / "shards" / name, batch_size=1, workers=0) as loader:
            assert (loader.dataset.root, len(loader.dataset)) == (found["root"], found["records"])
            assert (found["against"] is None) == (name == "val")


def test_a_collection_has_no_page_of_its_own(folder: Path) -> None:
    collect(folder / "both", [folder / "shards/train", folder / "shards/val"])
    for words in (("report", "both", "-o", "both.html"), ("inspect", "both", "--html", "both.html")):
        done = prep_here(*words, cwd=folder)

        assert done.returncode == 2
        assert "its parts, one at a time" in done.stderr
        assert not (folder / "both.html").exists()


def test_the_custody_of_a_record_leads_from_its_bytes_to_the_root(folder: Path) -> None:
    with open_dataset(folder / "shards/train") as opened:
        last, manifest = opened[len(opened) - 1], opened.manifest
    words = ("report", "shards/train", "-o", "record.html", "--pixels", "none", "--json", "--record")
    done, unknown = (prep_here(*words, key, cwd=folder) for key in (last.key, "\ud800"))

    chain = json.loads(done.stdout)["custody"]
    shard = folder / "shards/train" / chain["example"]["shard"]
    with Shard(shard, manifest.container) as reader:
        image = reader.read_record(chain["example"]["ordinal"]).image
    assert (chain["example"]["key"], image, chain["root"]) == (last.key, last.image, manifest.root)
    assert chain["example"]["sha256"] == hash_file(shard)
    assert chain["example"]["sha256"] in (folder / "record.html").read_text()
    assert unknown.returncode == 2
    assert "has no record with the key" in unknown.stderr
