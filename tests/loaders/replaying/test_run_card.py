"""The card of a run: a loader that is made of it has the same batches; anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.loaders import (
    ColorJitter,
    EvalTransform,
    GlobalShuffle,
    Loader,
    LocalShuffle,
    RunCard,
    TrainTransform,
)
from shardprep.loaders.loader.run_log import RunLog
from support.loaded import assert_same, epoch_of, loader_on

RUNS: dict[str, dict[str, Any]] = {
    "plain": {"transform": None, "shuffle": None},
    "train": {
        "transform": TrainTransform((9, 8), scale=(0.5, 1), color_jitter=ColorJitter(0.1), lighting=0.1),
        "shuffle": LocalShuffle(60, partitions=2),
        "seed": 5,
        "rank": 1,
        "world_size": 2,
    },
    "eval": {"transform": EvalTransform(8, resize=np.int64(9), dtype="float16"), "shuffle": GlobalShuffle()},
    "subset": {"transform": None, "records": np.arange(0, 204, 3), "drop_last": True, "with_numbers": False},
    "window in bytes": {"transform": None, "shuffle": LocalShuffle("500KB"), "labels": "ilsvrc2012_id"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_loader_of_a_card_has_the_batches_of_the_run(name: str, lmdb_shards: Path, tmp_path: Path) -> None:
    with loader_on(lmdb_shards, **RUNS[name]) as loader:
        expected = epoch_of(loader, 3)
        card = loader.card()
        card.save(tmp_path / "card.json")
    read = RunCard.load(tmp_path / "card.json")
    with Loader(lmdb_shards, workers=0, **read.options()) as again:
        assert_same(epoch_of(again, 3), expected)
        assert again.card() == card

    assert read == card
    assert (tmp_path / "card.json").read_bytes() == canonical_json(card.to_json())


def test_many_chosen_records_are_known_by_their_digest(
    tmp_path: Path, lmdb_shards: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shardprep.loaders.loader.run_card.MOST_LISTED", 10)
    with loader_on(lmdb_shards, transform=None, records=np.arange(30)) as loader:
        card = loader.card()
    with pytest.raises(UsageError, match="30 records"):
        card.options()
    assert RunCard.from_json(card.to_json()) == card


@pytest.fixture(scope="module")
def good(lmdb_shards: Path) -> bytes:
    """The bytes of a card."""
    with loader_on(lmdb_shards, **RUNS["train"], records=range(0, 204, 2)) as loader:
        return canonical_json(loader.card().to_json())


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_changed_card_is_refused_or_is_another_card(
    data: st.DataObject, good: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = data.draw(st.integers(0, len(good) - 1))
    inserted = data.draw(
        st.binary(max_size=3) | st.sampled_from([b"null", b"-1", b"1e999", b"[[", b"{}", b'"'])
    )
    changed = good[:at] + inserted + good[at + data.draw(st.integers(0, 4)) :]
    file = tmp_path_factory.getbasetemp() / "changed card.json"
    file.write_bytes(changed)
    try:
        found = canonical_json(RunCard.load(file).to_json())
    except (DataError, UnknownVersion) as error:
        found = str(error).encode()

    assert found == changed or str(file).encode() in found


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "0"},
        {"seed": True},
        {"batch_size": -1},
        {"more": 1},
        {"shuffle": {"kind": "local"}},
        {"shuffle": {"kind": "local", "window": 0}},
        {"transform": {"name": "TrainTransform", "identity": None, "arguments": {"size": 1 << 40}}},
        {"transform": {"name": "os", "identity": None, "arguments": {}}},
        {"transform": []},
        {"records": {"count": 1, "digest": "", "numbers": [1 << 70]}},
        {"columns": "image"},
        {"versions": {"opencv": 5}},
    ],
    ids=str,
)
def test_a_card_with_other_values_is_damaged(change: dict[str, Any], good: bytes) -> None:
    with pytest.raises(DataError):
        RunCard.from_json(json.loads(good) | change)


def test_damage_names_the_part_of_the_card_and_another_version_is_unknown(good: bytes) -> None:
    with pytest.raises(DataError, match="its drop_last: null has the wrong type"):
        RunCard.from_json(json.loads(good) | {"drop_last": None})
    with pytest.raises(UnknownVersion):
        RunCard.from_json(json.loads(good) | {"version": 2})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch":0,"place":0,"receipt":{}}', "[" * 100_000])
def test_what_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "state").write_text(text)
    with pytest.raises(DataError, match="state"):
        RunLog.load(tmp_path / "state")
