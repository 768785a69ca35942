"""An examination finds what is odd in a dataset, and nothing that is not; a gate counts it."""

import json
import os
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats import Examination, GateCheck, GateResult, gate, open_dataset, read_manifest, report
from shardprep.formats.errors import UsageError
from shardprep.formats.reports.duplicates import near_pairs
from shardprep.formats.reports.examine import histogram, observation
from shardprep.formats.reports.gate import _check, read_limits
from shardprep.formats.reports.pages import height_of, histogram as chart
from shardprep.formats.runtime.progress import format_size
from support.crashing_decoder import write_images
from support.datasets import converted, flip, prep, prep_here, writable
from support.examined import Made, made_datasets
from support.image_files import encoded, pixels
from support.source_builders import write

Built = tuple[Path, Path, Made, set[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return made_datasets(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def found(built: Built) -> Examination:
    train, val, _, _ = built
    return report(train, against=val, workers=2)


def observed(found: Examination, kind: str) -> dict[str, Any]:
    """The observation of a kind, of which there must be one."""
    (one,) = [one for one in found.to_json()["observations"] if one["kind"] == kind]
    return one


def pairs(found: Examination, kind: str) -> set[frozenset[str]]:
    return {frozenset(one["key"] for one in pair["records"]) for pair in observed(found, kind)["pairs"]}


def keys(found: Examination, kind: str) -> set[str]:
    return {one["key"] for one in observed(found, kind)["records"]}


def test_all_duplicates_and_suspects_and_nothing_else_are_found(built: Built, found: Examination) -> None:
    made = built[2]

    assert pairs(found, "suspects") == made.mislabelled
    assert pairs(found, "equal bytes") == made.exact - made.mislabelled
    assert pairs(found, "look alike") == made.near - made.mislabelled


def test_all_record_numbers_are_in_the_json_and_without_them_nothing_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = [cv2.resize(rng.integers(0, 256, (9, 9, 3), np.uint8), (64, 64)) for _ in range(40)]
    for name, label, number, image in (
        *(("train", "ant", n, encoded(noise[n])) for n in range(40)),
        *(("train", "ant", 40 + n, encoded(noise[n])) for n in range(30)),  # equal bytes
        *(("train", "bee", n, encoded(noise[n])) for n in (0, 39)),
        *(("val", "ant", n, encoded(noise[n], ".jpg", cv2.IMWRITE_JPEG_QUALITY, 80)) for n in range(32)),
    ):
        write(tmp_path / f"{name}-images" / label / f"{number:02}.jpg", image)
    for name in ("train", "val"):
        converted(tmp_path / f"{name}-images", tmp_path / name)

    found = report(tmp_path / "train", against=tmp_path / "val", workers=0)

    found.save_findings(tmp_path / "findings.json")
    saved = json.loads((tmp_path / "findings.json").read_text())
    left_out, leaks = saved["leave_out"], observed(found, "leaks")
    with open_dataset(tmp_path / "train") as opened:
        keys = [record.key for record in opened]
        assert saved["root"] == opened.root
    leaked = {"bee/00.jpg", *(f"ant/{n:02}.jpg" for n in (*range(32), *range(40, 70)))}
    assert len(leaks["all_pairs"]) == leaks["count"] > len(leaks["pairs"])
    assert '<p class="soft"><code>prep report --save-findings' in found.to_html()
    assert {keys[n] for n in left_out["leaks"]} == {keys[n] for n, *_ in leaks["all_pairs"]} == leaked
    suspects = {"ant/00.jpg", "ant/39.jpg", "ant/40.jpg", "bee/00.jpg", "bee/39.jpg"}
    assert {keys[n] for n in left_out["suspects"]} == suspects
    assert len(left_out["equal bytes"]) == 30
    assert (saved["records"], saved["partial"], left_out["tiny"]) == (72, [], [])
    assert found.to_json()["index"]["class_sizes"]["edges"][-1] == 70  # of ant, class 0


def test_images_of_another_split_are_leaks_whatever_their_bytes(built: Built, found: Examination) -> None:
    leaks = observed(found, "leaks")["pairs"]

    assert {pair["records"][0]["key"] for pair in leaks} == built[3]
    others = {f"{('ant', 'bee', 'cat')[(n + 10) % 3]}/v{n}.jpg" for n in range(4)}
    assert {pair["records"][1]["key"] for pair in leaks} == others
    assert [pair["distance"] is None for pair in leaks].count(True) == 2
    against = found.to_json()["against"]
    assert (against["equal_images"], against["similar_images"]) == (2, 2)
    assert (against["common_classes"], against["missing_there"], against["missing_here"]) == (3, 1, 0)


def test_what_is_odd_is_named(built: Built, found: Examination) -> None:
    odd = built[2].odd

    for kind in ("damaged", "CMYK", "EXIF orientation", "tiny"):
        assert keys(found, kind) == odd[kind]
    first = {name: records[0]["key"] for name, records in found.to_json()["extremes"].items()}
    planted = ("brightest", "darkest", "blurriest")
    assert {first[name] for name in planted} == set().union(*(odd[name] for name in planted))
    flat = {one["key"] for one in found.to_json()["extremes"]["flattest"] if one["value"] == 0}
    assert odd["flattest"] | odd["brightest"] | odd["darkest"] <= flat


def test_the_result_and_its_page_do_not_depend_on_the_workers(built: Built, found: Examination) -> None:
    alone = report(built[0], against=built[1], workers=0)

    assert alone == found
    assert alone.to_html() == found.to_html()
    parsed = json.loads(json.dumps(found.to_json()))  # which has all that the page shows
    assert Examination(parsed, found.pictures).to_html() == found.to_html()
    parsed["classes"][0]["words"] = "emmet"
    assert "<bdi>ant (emmet)</bdi>" in Examination(parsed, found.pictures).to_html()


def test_only_a_sample_of_some_images_may_miss_one(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*map(str, gate(built[1], {"damaged": 0}, pixels="sample").checks)] == ["0, at most 0"]
    monkeypatch.setattr("shardprep.formats.reports.examine.MAX_DECODED", 5)

    sampled = report(built[0], workers=0)

    looked_at = sampled.to_json()["looked_at"]
    assert (looked_at["pixels"], looked_at["decoded"]) == ("sample", 5)
    assert pairs(sampled, "equal bytes") | pairs(sampled, "suspects") >= built[2].exact
    assert observed(sampled, "equal bytes")["is_partial"]
    assert str(gate(built[1], {"damaged": 0}, pixels="sample").checks[0]) == "at least 0, at most 0"
    assert report(built[0], workers=0, pixels="all").to_json()["looked_at"]["decoded"] == looked_at["images"]


def test_a_class_that_is_not_there_is_named_with_those_close_to_it(built: Built) -> None:
    misuses: list[tuple[str, Any, str]] = [
        ("classes", ["beee"], "has no class 'beee'; close are bee"),
        ("classes", "bee", "must be a list of names"),
        ("record", 5, "named by its key"),
        ("pixels", "some", "unknown pixels 'some'"),
        ("seed", -1, "a seed must be a whole number"),
    ]
    for name, value, says in misuses:
        with pytest.raises(UsageError, match=says):
            report(built[0], **{name: value})


def test_sheets_of_named_classes_show_more_of_them(built: Built, found: Examination) -> None:
    sheets = report(built[0], classes=["cat", "ant", "cat"], workers=0).to_json()["sheets"]
    assert [(sheet["name"], len(sheet["records"])) for sheet in sheets] == [
        (name, min(60, sheet["images"])) for name, sheet in zip(("cat", "ant"), sheets, strict=True)
    ]
    assert min(sheet["images"] for sheet in sheets) > 8
    assert max(len(sheet["records"]) for sheet in found.to_json()["sheets"]) == 8


def test_damaged_records_and_shards_are_observations(built: Built, tmp_path: Path) -> None:
    dataset = tmp_path / "damaged"
    converted(built[0].parent / "train-images", dataset, shard_size=60_000)
    with open_dataset(dataset) as opened:
        shard_of, image = opened.index["shard"], opened[opened.index["shard"].tolist().index(1)].image
        unreadable, hit = (dataset / opened.manifest.shards[n].name for n in (0, 1))
    writable(unreadable).write_bytes(b"")
    flip(hit, hit.read_bytes().index(image[:64]) + 50)

    found = report(dataset, workers=0, pixels="all")

    damaged = {one["record"]: one["note"] for one in observed(found, "damaged")["records"]}
    of_first = np.flatnonzero(shard_of == 0).tolist()
    (other,) = [note for record, note in damaged.items() if shard_of[record] == 1 and "decode" not in note]
    assert {record for record in damaged if shard_of[record] == 0} == set(of_first)
    assert "does not match its CRC-32C" in other
    assert found.to_html()

    writable(unreadable).unlink()
    missing = observed(report(dataset, workers=0), "damaged")["records"]
    known = damaged | dict.fromkeys(of_first, "the shard is missing")
    assert {one["record"]: one["note"] for one in missing} == known


def test_images_that_were_left_out_and_classes_without_any_are_named(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 6)
    (images / "class9").mkdir()
    (images / "class9" / "cut.jpg").write_bytes(encoded(pixels(40, 40, 3))[:200])
    converted(images, tmp_path / "d", on_bad_image="skip")

    found = report(tmp_path / "d", pixels="none")

    assert observed(found, "empty classes")["names"] == ["class9"]
    (named,) = observed(found, "quarantined")["names"]
    assert named.startswith("class9/cut.jpg: ")
    assert "class9/cut.jpg" in found.to_html()


def test_each_planted_fault_is_named_and_exceeds_a_lower_limit(built: Built, found: Examination) -> None:
    train, val, made, leaks = built
    suspects = {key for pair in made.mislabelled for key in pair}
    planted = {
        "leaks": len(leaks),
        "mislabelled": len(suspects),
        "duplicates": len(made.exact - made.mislabelled),
        "similar": len(made.near - made.mislabelled),
        **dict.fromkeys(("empty-classes", "quarantined"), 0),
        **dict.fromkeys(("damaged", "cmyk", "exif-orientation", "tiny"), 1),
    }

    fitting = gate(train, planted, against=val, workers=2)
    strict = gate(train, {name: max(0, n - 1) for name, n in planted.items()}, against=val, workers=2)

    assert ({check.name: check.found for check in fitting.checks}, fitting.passed) == (planted, True)
    assert {check.name for check in strict.checks if not check.passed} == {n for n in planted if planted[n]}
    left_out = found.findings()["leave_out"]
    kind = {"leaks": "leaks", "mislabelled": "suspects", "duplicates": "equal bytes", "similar": "look alike"}
    named = {kind.get(check.name, ""): {*check.records} for check in strict.checks}
    with open_dataset(train) as ds:
        assert all(named[one] == {ds[each].key for each in left_out[one]} for one in kind.values())


def test_a_logarithmic_histogram_may_have_zeros_and_small_fractions() -> None:
    assert sum(histogram(np.array([0] * 9 + [1, 999]), is_logarithmic=True)["counts"]) == 11
    assert histogram(np.array([1 / 4000, 1, 4000]), is_logarithmic=True)["edges"][0] == 1 / 4000


def test_a_chart_labels_different_values_differently_each_at_its_place() -> None:
    drawn = chart([1100, 1150.0004, 1199], [3, 1], title="Bytes", axis="bytes", show=format_size)

    up = re.findall(r'<text class="tick end" x="75" y="(\d+)">(.+?)</text>', drawn)
    assert up == [("156", "0"), (f"{height_of(1 / 3) + 4:.0f}", "1"), ("14", "3")]
    assert re.findall("<td>(.*?)</td>", drawn)[::2] == ["1,100 to 1,150.0004", "1,150.0004 to 1,199"]


def test_a_share_is_exact_as_it_is_written() -> None:
    seen = observation("CMYK", 29)
    found: Any = SimpleNamespace(found={"observations": [seen], "dataset": {"records": 100}})

    assert 29 > 0.29 * 100
    assert [_check("cmyk", share, found).passed for share in (0.29, 0.2899)] == [True, False]


def test_no_shard_is_read_without_pixels_for_another_root_or_a_limit_of_the_index_alone(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardprep.formats.shards.lmdb.CONTAINER", None)
    train = built[0]
    root, read = read_manifest(train).root, report(train, pixels="none", workers=0)

    assert not read.pictures
    assert {one["kind"] for one in read.to_json()["observations"]} == {"CMYK", "EXIF orientation", "tiny"}
    assert gate(train, {}, root=root).passed
    found = gate(train, {"damaged": 0}, root="sha256:00")

    assert ([check.name for check in found.checks], found.passed) == (["root"], False)
    assert (found.looked_at, str(found.checks[0])) == (0, f"{root}, not sha256:00")
    assert gate(train, {"cmyk": 9}, against=train, pixels="sample").checks[0].name == "leaks"
    assert gate(train, {"cmyk": np.int64(0), "empty-classes": np.float32(0.5)}).looked_at == 0


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        ({}, {}, "needs a root, canaries or a limit"),
        ({"ducks": 0}, {}, "unknown limit 'ducks'; choose from damaged, leaks"),
        ({"leaks": 0}, {}, "needs another dataset"),
        ({"damaged": 0}, {"pixels": "none"}, "a limit of damaged needs images"),
        ({"damaged": -1}, {}, "a number of records, or a share below 1, not -1"),
        ({"damaged": 1.5}, {}, "not 1.5"),
        ({"damaged": float("nan")}, {}, "not nan"),
        ({"damaged": True}, {}, "not True"),
        ({"damaged": "0"}, {}, "not '0'"),
    ],
)
def test_a_gate_that_means_nothing_is_an_error(
    built: Built, limits: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        gate(built[0], limits, **options)


def test_the_command_exits_with_one_and_says_which_records(built: Built, tmp_path: Path) -> None:
    train, val, _, leaks = built
    (tmp_path / "gate.toml").write_text("\ufeff[max]\nleaks = 0\nduplicates = 0.5\ndamaged = 1\n")
    words = ["gate", train, "--against", val, "--limits", tmp_path / "gate.toml", "--workers", 2]

    strict = prep(*words, "--junit", tmp_path / "gate.xml")
    typed = prep_here(*words, "--max-leaks", len(leaks), "--json")

    assert strict.returncode == 1
    assert f"FAIL  leaks             {len(leaks)}, at most 0\n" in strict.stdout
    assert all(key in strict.stdout for key in leaks)
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()  # noqa: S314 - made here
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert {*(suite.find("testcase[@name='leaks']/failure").text or "").split()} == leaks  # type: ignore[union-attr]
    assert (typed.returncode, json.loads(typed.stdout)["passed"]) == (0, True)


def test_each_split_of_a_folder_is_checked(built: Built, tmp_path: Path) -> None:
    words = ("gate", built[0].parent, "--against", built[1], "--max", "tiny=0", "--max-damaged", "0.5")
    done = prep_here(*words, "--max-leaks", "99", "--junit", tmp_path / "g.xml")

    assert (done.returncode, "1 of 2 passed" in done.stdout) == (1, True)
    assert len(list(tmp_path.glob("g-*.xml"))) == 2


@pytest.mark.parametrize("text", ["[max", "max=3", "root=5", "[least]\nleaks=1", "\udcff", "a=" + "[" * 5000])
def test_a_file_of_something_else_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_bytes(text.encode("utf-8", "surrogateescape"))

    os.mkfifo(tmp_path / "fifo")
    for name, says in (("gate.toml", None), ("fifo", "not a regular file")):
        with pytest.raises(UsageError, match=says):
            read_limits(tmp_path / name)


@given(keys=st.lists(st.text(), max_size=4), path=st.text())
def test_any_key_and_path_make_xml_that_parses(keys: list[str], path: str) -> None:
    checks = GateCheck("leaks", False, len(keys) + 1, 0, tuple(keys)), GateCheck("root", False, "", path)

    suite = ElementTree.fromstring(GateResult(path, "sha256:0", 9, 9, checks).to_junit())  # noqa: S314

    assert suite.findtext("testcase/failure", "").endswith("and 1 more")


flips = st.sets(st.integers(0, 63), max_size=7)


@st.composite
def hashes(draw: st.DrawFn) -> list[int]:
    """Hashes of which many differ from another one in a few bits."""
    bases = draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3))
    made = draw(st.lists(st.tuples(st.sampled_from(bases), flips), max_size=24))
    return [base ^ sum(1 << bit for bit in bits) for base, bits in made]


@given(hashes(), st.integers(0, 6))
def test_a_banded_search_names_the_pairs_of_brute_force_once(values: list[int], distance: int) -> None:
    parts = near_pairs(np.array(values, np.uint64), distance)
    found = [tuple(pair) for part in parts for pair in part.tolist()]

    assert len(found) == len(set(found))
    numbered = combinations(enumerate(values), 2)
    assert set(found) == {(i, j) for (i, a), (j, b) in numbered if (a ^ b).bit_count() <= distance}


def test_the_banded_search_compares_fewer_pairs_than_there_are_hashes() -> None:
    many = np.random.default_rng(0).integers(0, 1 << 64, 5000, dtype=np.uint64)
    with patch.object(np, "bitwise_count", wraps=np.bitwise_count) as compare:
        assert not list(near_pairs(many, 4))
    assert sum(call.args[0].size for call in compare.call_args_list) < len(many)
