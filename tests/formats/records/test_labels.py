"""Label spaces: which integer stands for which class."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import SPACES, LabelSpace, official_words

OFFICIAL = LabelSpace.of(official_words())
names = st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=8), max_size=20)


def test_the_official_classes_are_a_thousand_in_sorted_order() -> None:
    wnids = [c.name for c in OFFICIAL.classes]

    assert (len(wnids), wnids[0], wnids[65], wnids[-1]) == (1000, "n01440764", "n01751748", "n15075141")
    assert wnids == sorted(set(wnids))
    assert all(c.words for c in OFFICIAL.classes)
    assert OFFICIAL.is_official


def test_the_digest_of_the_official_classes_never_changes() -> None:
    assert OFFICIAL.digest == "sha256:9a765b7a8a8604f0c3d8026c4339518b395d0039a9872a2b2c4e700f5b2b9aa2"


def test_two_classes_may_share_their_words_and_keep_their_labels() -> None:
    cranes = [label for label, c in enumerate(OFFICIAL.classes) if c.words == "crane"]

    assert cranes == [134, 517]


@given(names)
def test_names_are_unique_and_sorted_and_give_their_labels(names: list[str]) -> None:
    space = LabelSpace.of(names)

    assert [c.name for c in space.classes] == sorted(set(names))
    assert all(space.classes[label].name == name for name, label in space.label_of.items())
    assert len(space) == len(space.label_of)


@given(names, st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_a_space_survives_its_json(names: list[str], words: dict[str, str]) -> None:
    ids = {name: number for number, name in enumerate(names, 1)}
    space = LabelSpace.of(names, words, ids)

    assert LabelSpace.from_json(space.to_json()) == space


@given(names, names)
def test_spaces_have_equal_digests_where_their_names_are_equal(one: list[str], other: list[str]) -> None:
    assert (LabelSpace.of(one).digest == LabelSpace.of(other).digest) == (set(one) == set(other))


def test_words_given_go_before_words_known() -> None:
    space = LabelSpace.of(["n01440764", "n2"], words={"n01440764": "Schleie"})

    assert [c.words for c in space.classes] == ["Schleie", None]
    assert not space.is_official


DEVKIT = LabelSpace.of(["a", "b", "c"], ids={"a": 3, "b": 1, "c": 2})
MAPPINGS = {"sorted_wnid0": [0, 1, 2, -1], "ilsvrc2012_id": [3, 1, 2, -1], "sorted_wnid1_bg": [1, 2, 3, -1]}


@pytest.mark.parametrize("space", SPACES)
def test_a_mapping_gives_each_label_in_another_space_and_keeps_unlabelled(space: str) -> None:
    mapping = DEVKIT.mapping(space)

    assert mapping.dtype == np.int64
    assert mapping.tolist() == MAPPINGS[space]
    assert mapping[-1] == -1


def test_devkit_ids_lead_back_to_labels() -> None:
    assert [DEVKIT.label_of_id[number] for number in DEVKIT.mapping("ilsvrc2012_id")[:-1]] == [0, 1, 2]


def test_devkit_ids_that_are_not_known_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="converted with the devkit"):
        LabelSpace.of(["a", "b"], ids={"a": 1}).mapping("ilsvrc2012_id")


def test_an_unknown_space_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="known are sorted_wnid0"):
        DEVKIT.mapping("caffe")
