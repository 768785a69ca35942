"""The classes of a dataset, as ``prep inspect --classes`` lists them."""

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
