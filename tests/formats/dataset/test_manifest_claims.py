"""The manifest's statements about the records are checked against them, as far as these show them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import Manifest, ManifestDamaged, open_dataset, read_manifest, verify
from shardprep.formats.records.labels import LabelSpace, official_words
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.shards.files import Rows
from shardprep.formats.verification.checks import check_quarantine, false_claims
from support.datasets import converted
from support.image_files import png
from support.resealed import Json


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("promises") / "val"
    converted(archives, output, split="val", shard_size=4 << 20)
    return output


@pytest.fixture(scope="module")
def opened(intact: Path) -> tuple[Manifest, Rows]:
    with open_dataset(intact) as dataset:
        return dataset.manifest, dataset.index


def broken(manifest: Manifest, index: Rows) -> str:
    return "; ".join(false_claims(manifest, index))


@pytest.mark.parametrize("plan", [{"seed": 1}, {"seed": -1}, {"seed": 1 << 64}, {"order": "key"}])
def test_another_order_than_the_plans_is_found(opened: tuple[Manifest, Rows], plan: Json) -> None:
    manifest, index = opened

    assert "its order differs from the plan's" in broken(replace(manifest, plan=manifest.plan | plan), index)


def test_equal_keys_are_found(opened: tuple[Manifest, Rows]) -> None:
    manifest, index = opened
    index = index.copy()
    index["key"][[2, 7]] = index["key"][4]

    assert "two records have the same key" in broken(manifest, index)


def test_partial_is_known_for_the_official_classes(opened: tuple[Manifest, Rows]) -> None:
    manifest, index = opened
    official = replace(manifest, labels=LabelSpace.of(official_words()))

    assert "its partial is False, with 10 images of 50000" in broken(official, index)
    assert broken(replace(official, partial=True), index) == ""
    assert broken(replace(manifest, partial=True), index) == ""


def test_a_sorted_order_is_found_where_it_is_denied(opened: tuple[Manifest, Rows]) -> None:
    manifest, index = opened
    assert "its class_sorted is True" in broken(replace(manifest, class_sorted=True), index)

    index = index[np.argsort(index["label"], kind="stable")]

    assert "its class_sorted is False" in broken(manifest, index)


LISTS = {
    "one image too few": [],
    "an image more": [{"key": "k", "where": "w", "reason": "r"}] * 3,
    "no list": {},
    "no images": ["k"] * 2,
    "numbers": [{"key": 1, "where": "w", "reason": "r"}] * 2,
}


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset from a source with two bad images."""
    folder = tmp_path_factory.mktemp("quarantined")
    for number, name in enumerate("aabbab"):
        path = folder / "source" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if number in (0, 3) else png(number + 1, 2, 2))
    converted(folder / "source", folder / "out", on_bad_image="skip")
    return folder / "out"


def test_a_quarantine_list_that_is_right_is_no_finding(quarantined: Path) -> None:
    assert read_manifest(quarantined).skipped == 2
    assert verify(quarantined, level="records").findings == []


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_a_quarantine_list_that_is_not_what_was_skipped_is_refused(
    quarantined: Path, tmp_path: Path, listed: object
) -> None:
    (tmp_path / "quarantine.json").write_bytes(canonical_json(listed))

    with pytest.raises(ManifestDamaged) as raised:
        check_quarantine(tmp_path, read_manifest(quarantined))
    assert raised.value.path == str(tmp_path / "quarantine.json")
