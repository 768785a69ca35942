"""What Ctrl-C says: which shards are kept, where that is so."""

import json
import re
from pathlib import Path

import pytest

from shardprep.formats.runtime.work_folder import finished_shards
from support.datasets import converted, flip, prep
from support.scripts import interrupted

pytestmark = pytest.mark.slow


def conversion(archives: Path, output: Path, *words: object) -> list[object]:
    return ["convert", archives, output, "--shard-size", 1, "--workers", 1, "--quiet", *words]


@pytest.mark.torture
def test_a_conversion_says_how_many_shards_are_kept_and_the_next_run_what_it_found(
    archives: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = conversion(archives, output, "--split", "train")

    restarted = interrupted(*words, "--restart", when=lambda: len(finished_shards(output)) > 2)[2]
    before = len(finished_shards(output))
    code, _, complained = interrupted(*words, when=lambda: len(finished_shards(output)) > before + 2)
    kept = len(finished_shards(output))
    finished = prep(*(word for word in words if word != "--quiet"), check=True)

    assert re.search(r"shards (is|are) done; run it again, without restart, to continue\n$", restarted)
    match = re.fullmatch(
        r"prep: interrupted; (\d+) of (\d+) shards (?:is|are) done; run it again to continue\n", complained
    )
    assert match, complained
    assert (code, int(match[1])) == (130, kept)
    assert re.search(rf"^\S+ {kept} of \d+ shards (is|are) done already$", finished.stderr, re.M)


@pytest.mark.torture
def test_the_shards_of_the_split_in_work_are_counted(archives: Path, tmp_path: Path) -> None:
    words, val = conversion(archives, tmp_path / "out"), tmp_path / "out" / "val"
    _, _, complained = interrupted(*words, when=lambda: len(finished_shards(val)) > 2)
    kept = len(finished_shards(val))
    assert re.search(rf"; {kept} of \d+ shards (is|are) done; ", complained), complained


def test_an_interruption_is_json_where_results_are(archives: Path, tmp_path: Path) -> None:
    words = conversion(archives, tmp_path / "out", "--split", "train", "--json")

    code, said, _ = interrupted(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    error = json.loads(said)["error"]
    assert (code, error["kind"], error["exit_code"], error["signal"]) == (130, "Interrupted", 130, 2)
    assert re.search("shards (is|are) done", error["message"])


@pytest.mark.torture
def test_a_repair_says_how_many_shards_are_rebuilt(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "out", shard_size=1)
    for shard in (tmp_path / "out").glob("shard-*"):
        flip(shard)
    words = ["repair", tmp_path / "out", "--source", archives, "--workers", 1, "--quiet"]

    _, _, complained = interrupted(*words, when=lambda: len(finished_shards(tmp_path / "out")) > 2)

    kept = len(finished_shards(tmp_path / "out"))
    assert re.search(rf"; {kept} of \d+ shards are rebuilt; run it again to continue", complained), complained
