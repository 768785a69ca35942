"""What stands for a class and for a manifest: label spaces, and one JSON text for one value."""

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import SPACES, LabelSpace, official_words
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of

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


def test_the_text_never_changes() -> None:
    value = {"b": [1, -2.5, True, None], "a": "é\n", "": {}}

    assert canonical_json(value) == b'{"":{},"a":"\\u00e9\\n","b":[1,-2.5,true,null]}\n'
    assert sha256_of(value) == "sha256:fedcad82d76705603b4cdc3e949793ce6f5bd8c90ea88b8489ddb7ce0fb92f19"


OTHER_TEXTS = {
    "no newline": b"1",
    "carriage return": b"1\r\n",
    "space": b'{"a": 1}\n',
    "unsorted keys": b'{"b":1,"a":2}\n',
    "duplicate keys": b'{"a":1,"a":1}\n',
    "needless escape": b'"\\u0061"\n',
    "no escape": '"é"\n'.encode(),
    "float with more digits": b"1.50\n",
    "minus zero": b"-0\n",
    "NaN": b"NaN\n",
    "infinity": b"1e400\n",
    "5,000 digits": b"9" * 5000 + b"\n",
    "200,000 lists": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "byte order mark": b"\xef\xbb\xbf1\n",
    "UTF-16": '"a"\n'.encode("utf-16"),
    "invalid UTF-8": b'"\xff"\n',
    "two values": b"1 2\n",
    "nothing": b"",
}


@pytest.mark.parametrize("text", OTHER_TEXTS.values(), ids=OTHER_TEXTS)
def test_every_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|canonical"):
        parse_canonical_json(text)
