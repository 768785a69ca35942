"""Label spaces: which integer stands for which class."""

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import SPACES, LabelSpace, official_words

OFFICIAL = LabelSpace.of(official_words())


def test_the_digest_of_the_official_classes_never_changes() -> None:
    assert OFFICIAL.digest == "sha256:9a765b7a8a8604f0c3d8026c4339518b395d0039a9872a2b2c4e700f5b2b9aa2"


DEVKIT = LabelSpace.of(["a", "b", "c"], ids={"a": 3, "b": 1, "c": 2})
MAPPINGS = {"sorted_wnid0": [0, 1, 2, -1], "ilsvrc2012_id": [3, 1, 2, -1], "sorted_wnid1_bg": [1, 2, 3, -1]}


@pytest.mark.parametrize("space", SPACES)
def test_a_mapping_gives_each_label_in_another_space_and_keeps_unlabelled(space: str) -> None:
    mapping = DEVKIT.mapping(space)

    assert mapping.dtype == np.int64
    assert mapping.tolist() == MAPPINGS[space]
    assert mapping[-1] == -1


def test_devkit_ids_that_are_not_known_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="converted with the devkit"):
        LabelSpace.of(["a", "b"], ids={"a": 1}).mapping("ilsvrc2012_id")
