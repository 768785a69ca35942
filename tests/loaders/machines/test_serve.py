"""``prep serve`` as a user runs it: it makes the batches that a local loader makes."""

import json
import re
from operator import length_hint
from pathlib import Path

import numpy as np
import pytest

from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from shardprep.loaders.remote import RemoteSource
from support.datasets import prep_here
from support.key_files import KeyFolder
from support.remote_ends import ANY_PORT, python
from support.waiting import until

OPTIONS = ("--batch-size", 8, "--size", 224, "--shuffle", 10, "--seed", 3, "--workers", 1)


@pytest.mark.slow
def test_it_serves_a_dataset_with_keys_and_prints_what_it_did(lmdb_shards: Path, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    with RemoteSource(ANY_PORT, keys=keys.receiver) as source:
        ends = ("--to", source.endpoint, "--key", tmp_path / "data1.key_secret", "--ahead", 2)
        words = (*ends, "--receiver", tmp_path / "train.key", *OPTIONS, "--name", "one", "--json", "--quiet")
        with python("-m", "shardprep", "serve", lmdb_shards, *words) as process:
            until(lambda: length_hint(source) > 0)  # from the sender
            served = list(source)
            assert [sender.name for sender in source.stats().senders] == ["one"]
            source.close()
            said, complained = process.communicate(timeout=60)

    with Loader(
        lmdb_shards, batch_size=8, transform=TrainTransform(224), shuffle=LocalShuffle(10), seed=3, workers=0
    ) as loader:
        np.testing.assert_equal(served, list(loader))
    assert process.returncode == 0
    assert re.fullmatch(r"(\d\d:\d\d:\d\d sending: .*\n)*", complained)  # each 30 s, and after 5 s
    told = json.loads(said)
    assert told["batches"] == len(served) > 0
    assert told["bytes"] >= sum(images.nbytes for images, _ in served)


@pytest.mark.filterwarnings("ignore:.* no keys")
@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--to", "tcp://10.1.2.3:8877"], 2, "prep keygen"),
        (["--to", "tcp://127.0.0.1:1", "--key", "x.key_secret"], 2, "go together"),
        (["--to", "nonsense"], 2, "tcp://"),
        ([], 2, "--to"),
        (["--to", "tcp://127.0.0.1:1", "--patience", -1], 2, "--patience"),
        (["--to", "tcp://127.0.0.1:1", "--patience", 0.1], 3, "there for 0.1 s; check the address"),
        (["--to", "tcp://0.0.0.0:1", "--patience", 0.1, "--insecure-plaintext"], 3, "check the address"),
    ],
)
def test_a_wrong_argument_or_a_receiver_that_is_not_there_is_reported(
    lmdb_shards: Path, words: list[object], code: int, complaint: str
) -> None:
    done = prep_here("serve", lmdb_shards, "--batch-size", 8, "--workers", 0, *words)

    assert done.returncode == code
    assert complaint in done.stderr
