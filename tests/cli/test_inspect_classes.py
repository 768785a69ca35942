"""The classes of a dataset, as ``prep inspect --classes`` lists them."""

import json
from pathlib import Path

import pytest

from shardprep.formats import open_dataset
from support.datasets import converted, prep_here


@pytest.fixture(scope="module")
def dataset(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("classes") / "train"
    converted(archives, output)
    return output


def test_each_class_has_its_label_images_name_and_words(dataset: Path) -> None:
    with open_dataset(dataset) as opened:
        classes = opened.manifest.labels.classes
        images = [int((opened.index["label"] == label).sum()) for label in range(len(classes))]

    said = prep_here("inspect", dataset, "--classes").stdout

    head, *rows = said.splitlines()[-len(classes) - 1 :]
    assert head.split() == ["label", "images", "name", "words"]
    assert [row.split(maxsplit=3) for row in rows] == [
        [str(label), str(images[label]), found.name, found.words] for label, found in enumerate(classes)
    ]


def test_the_same_classes_are_in_the_json(dataset: Path) -> None:
    found = json.loads(prep_here("inspect", dataset, "--classes", "--json").stdout)

    assert [entry["label"] for entry in found["class_counts"]] == list(range(found["classes"]))
    assert sum(entry["images"] for entry in found["class_counts"]) == found["records"]


def test_classes_are_listed_only_if_asked_for(dataset: Path) -> None:
    assert "label " not in prep_here("inspect", dataset).stdout
    assert "class_counts" not in json.loads(prep_here("inspect", dataset, "--json").stdout)


def test_a_split_without_labels_has_classes_without_images(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "test", split="test")

    found = json.loads(prep_here("inspect", tmp_path / "test", "--classes", "--json").stdout)

    assert {entry["images"] for entry in found["class_counts"]} == {0}
