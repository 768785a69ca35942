"""An examination finds what is odd in a dataset, and nothing that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import Examination, UsageError, open_dataset, report
from support.crashing_decoder import install, write_images
from support.datasets import converted, flip, writable
from support.examined import Made, made_datasets
from support.image_files import encoded, pixels

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


def test_duplicates_and_suspects_are_found_with_full_precision_and_recall(
    built: Built, found: Examination
) -> None:
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
        ("train", "bee", 0, encoded(noise[39])),
        *(("val", "ant", n, encoded(noise[n], ".jpg", cv2.IMWRITE_JPEG_QUALITY, 80)) for n in range(32)),
    ):
        path = tmp_path / f"{name}-images" / label / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    for name in ("train", "val"):
        converted(tmp_path / f"{name}-images", tmp_path / name)

    found = report(tmp_path / "train", against=tmp_path / "val", workers=0)

    found.save_findings(tmp_path / "findings.json")
    saved = json.loads((tmp_path / "findings.json").read_text())
    left_out, leaks = saved["leave_out"], observed(found, "leaks")
    with open_dataset(tmp_path / "train") as opened:
        keys = [record.key for record in opened]
        assert saved["root"] == opened.root
    leaked = {f"ant/{n:02}.jpg" for n in (*range(32), *range(40, 70))}
    assert len(leaks["all_pairs"]) == leaks["count"] > len(leaks["pairs"])
    assert {keys[n] for n in left_out["leaks"]} == {keys[n] for n, *_ in leaks["all_pairs"]} == leaked
    assert {keys[n] for n in left_out["suspects"]} == {"ant/39.jpg", "bee/00.jpg"}
    assert len(left_out["equal bytes"]) == 30
    assert (saved["records"], saved["partial"], left_out["tiny"]) == (71, [], [])


def test_similar_images_with_two_labels_are_not_said_to_be_wrong(found: Examination) -> None:
    advice = observed(found, "suspects")["advice"]

    assert advice.startswith(
        "2 pairs with equal bytes, 2 pairs of perceptual hashes that differ in at most 4 of 64 bits."
    )
    assert "Similar images may belong to two classes: look at them." in advice


def test_images_of_another_split_are_leaks_whatever_their_bytes(built: Built, found: Examination) -> None:
    leaks = observed(found, "leaks")["pairs"]

    assert {pair["records"][0]["key"] for pair in leaks} == built[3]
    assert {pair["records"][1]["key"] for pair in leaks} == {
        f"{('ant', 'bee', 'cat')[(n + 10) % 3]}/v{n}.jpg" for n in range(4)
    }
    assert [pair["distance"] is None for pair in leaks].count(True) == 2
    against = found.to_json()["against"]
    assert (against["equal_images"], against["similar_images"]) == (2, 2)
    assert (against["common_classes"], against["missing_there"], against["missing_here"]) == (3, 1, 0)


def test_what_is_odd_is_named(built: Built, found: Examination) -> None:
    odd = built[2].odd

    for kind in ("damaged", "CMYK", "EXIF orientation", "tiny"):
        assert keys(found, kind) == odd[kind]
    first = {name: records[0]["key"] for name, records in found.to_json()["extremes"].items()}
    assert {first[name] for name in ("brightest", "darkest", "blurriest")} == set().union(
        *(odd[name] for name in ("brightest", "darkest", "blurriest"))
    )
    flat = {one["key"] for one in found.to_json()["extremes"]["flattest"] if one["value"] == 0}
    assert odd["flattest"] | odd["brightest"] | odd["darkest"] <= flat


def test_the_result_and_its_page_do_not_depend_on_the_workers(built: Built, found: Examination) -> None:
    alone = report(built[0], against=built[1], workers=0)

    assert alone == found
    assert alone.to_html() == found.to_html()


def test_the_page_shows_nothing_that_the_json_has_not(found: Examination) -> None:
    parsed = json.loads(json.dumps(found.to_json()))

    assert Examination(parsed, found.pictures).to_html() == found.to_html()


def test_a_sample_says_that_there_may_be_more(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardprep.formats.reports.observations.MOST_DECODED", 5)

    sampled = report(built[0], workers=0)

    looked_at = sampled.to_json()["looked_at"]
    assert (looked_at["pixels"], looked_at["decoded"]) == ("sample", 5)
    assert pairs(sampled, "equal bytes") | pairs(sampled, "suspects") >= built[2].exact
    assert observed(sampled, "equal bytes")["is_partial"]
    assert report(built[0], workers=0, pixels="all").to_json()["looked_at"]["decoded"] == looked_at["images"]


def test_without_pixels_no_shard_is_read(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardprep.formats.shards.lmdb.CONTAINER", None)

    read = report(built[0], pixels="none", workers=0)

    assert not read.pictures
    assert {one["kind"] for one in read.to_json()["observations"]} == {"CMYK", "EXIF orientation", "tiny"}


def test_a_class_that_is_not_there_is_named_with_those_close_to_it(built: Built) -> None:
    with pytest.raises(UsageError, match=r"has no class 'beee'; close are bee"):
        report(built[0], classes=["beee"])
    with pytest.raises(UsageError, match="unknown pixels 'some'"):
        report(built[0], pixels="some")


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
    missing = {
        one["record"]: one["note"] for one in observed(report(dataset, workers=0), "damaged")["records"]
    }
    assert missing == damaged | dict.fromkeys(of_first, "the shard is missing")


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


@pytest.mark.torture
def test_an_image_that_crashes_the_decoder_is_damaged_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(write_images(tmp_path / "images", 9, 4), tmp_path / "d")
    install(tmp_path / "site", monkeypatch)

    found = report(tmp_path / "d", workers=1, pixels="all")

    (broken,) = observed(found, "damaged")["records"]
    assert (broken["key"], broken["note"]) == ("class0/004.jpg", "crashes the decoder (SIGSEGV)")
    counts = found.to_json()["pixels"]["histograms"]["brightness"]["counts"]
    assert sum(counts) == 8
    assert len(found.pictures) == 8
