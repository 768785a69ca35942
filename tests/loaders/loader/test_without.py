"""Runs that differ in nothing but the records and the steps that are left out of them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import DataError, UsageError
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle
from shardprep.loaders.loader.run_card import RunCard
from support.cut_datasets import collected
from support.datasets import prep_here
from support.loaded import assert_same, crops_on, epoch_of, kept

RECORDS = 204
SOME = [3, 50, 51, 52, 120, 199]
RUN: dict[str, Any] = {"shuffle": LocalShuffle(40), "seed": 5, "batch_size": 16, "drop_last": False}


@pytest.fixture(scope="module")
def whole(lmdb_shards: Path) -> list[Any]:
    """An epoch of all records."""
    with crops_on(lmdb_shards, **RUN) as loader:
        return epoch_of(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": [RECORDS]}, f"without= has {RECORDS}; record numbers"),
        ({"without": [3, 3]}, "without= has 3 more than once"),
        ({"without": ["no such key"]}, "the key 'no such key', which no record has"),
        ({"without": [True] * RECORDS}, "leaves out all records"),
        ({"without": [1.5]}, "not an array of float64"),
        ({"without": [1], "gaps": "open"}, "gaps must be 'close' or 'keep', not 'open'"),
        ({"without": [1], "shuffle": LocalShuffle(40, partitions=2)}, 'use gaps="keep"'),
        ({"records": [1, 2], "without": [1, 2]}, "leaves out all records"),
    ],
)
def test_what_cannot_be_left_out_is_an_error(
    lmdb_shards: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        crops_on(lmdb_shards, **options)


def test_every_form_of_a_choice_is_the_same_run(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        identity, keys = loader.identity, loader.dataset.index["key"][SOME]
        assert f"without {len(SOME)} of them" in repr(loader)
    names = [key.decode() for key in keys]
    numbers = np.isin(np.arange(RECORDS), SOME), np.array(SOME, np.uint16)
    for form in (*numbers, names, np.array(names), keys, np.array(names, object)):
        with crops_on(lmdb_shards, **RUN, without=form) as loader:
            assert loader.identity == identity
    with crops_on(lmdb_shards, **RUN, without=[]) as none, crops_on(lmdb_shards, **RUN) as plain:
        assert none.identity == plain.identity != identity


def test_what_is_mixed_is_what_the_others_are(lmdb_shards: Path) -> None:
    with (
        crops_on(lmdb_shards, **RUN) as plain,
        crops_on(lmdb_shards, **RUN, without=range(0, RECORDS, 3), gaps="keep") as kept,
    ):
        assert kept.shuffle_quality() == plain.shuffle_quality()
        labels = plain.dataset.index["label"]
    run = RUN | {"shuffle": GlobalShuffle()}
    with (
        crops_on(lmdb_shards, **run, without=labels < 2) as closed,
        crops_on(lmdb_shards, **run, records=labels >= 2) as subset,
    ):
        assert closed.shuffle_quality().classes.expected == subset.shuffle_quality().classes.expected
        assert str(closed.shuffle_quality()).startswith("As good as a full shuffle")


def test_steps_and_passed_places_that_cannot_be_meant_are_refused(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        for steps in (3, None, [1.5], ["1"]):
            with pytest.raises(UsageError, match="steps must be a list"):
                loader.skip(steps)  # type: ignore[arg-type]
        list(islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="step 2 begins before"):
            loader.skip([2, 3])
        loader.skip([3])
        for changed in ([[1]], [[5, 4]], "all", [[0, RECORDS + 1]], [[True, 3]]):
            with pytest.raises(UsageError, match="its passed steps"):
                loader.load_state_dict(loader.state_dict() | {"passed": changed})


def test_damaged_cards_without_records_are_refused_and_plain_ones_do_not_name_them(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        plain = loader.card().to_json()
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        value = loader.card().to_json()
    assert "without" not in plain
    assert RunCard.from_json(plain).without is None
    for wrong in (value | {"gaps": None}, value | {"without": None}, value | {"gaps": "open"}):
        with pytest.raises(DataError, match="damaged run card"):
            RunCard.from_json(wrong)


def test_weights_keep_gaps_only(lmdb_shards: Path, tmp_path: Path) -> None:
    path = collected(lmdb_shards, tmp_path / "cut", 2)
    weights = {"part-0": 1.0, "part-1": 3.0}
    with pytest.raises(UsageError, match="not possible with weights"):
        crops_on(path, without=[1], weights=weights)


def test_a_state_is_refused_by_a_run_without_other_records(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        state = loader.state_dict()
    for options in ({}, {"without": SOME[1:]}, {"without": SOME, "gaps": "keep"}):
        with (
            crops_on(lmdb_shards, **RUN, **options) as other,
            pytest.raises(UsageError, match=r"another dataset.* without= count as well"),
        ):
            other.load_state_dict(state)


def test_a_card_and_a_replay_are_without_them_too(lmdb_shards: Path, tmp_path: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        loader.card().save(tmp_path / "card.json")
        expected, state = epoch_of(loader), loader.state_dict()
    card = RunCard.load(tmp_path / "card.json")

    with Loader(lmdb_shards, workers=0, **card.options()) as again:
        assert_same([again.replay(0, 3).batch], [expected[3]])
        assert again.parting(loader) is None
    with crops_on(lmdb_shards, **RUN) as plain:
        parting = plain.parting(loader)
    assert parting
    assert parting.kind == "order"
    assert "without" in parting.because
    (tmp_path / "state.json").write_text(json.dumps(state))
    np.save(tmp_path / "gone.npy", np.array(SOME))
    words = ["replay", lmdb_shards, "--state", tmp_path / "state.json", "--epoch", 0, "--step", 3]
    refused = prep_here(*words)
    made = prep_here(*words, "--without", tmp_path / "gone.npy", "--json")
    assert refused.returncode == 2
    assert "without 6 records that its card does not list" in refused.stderr
    numbers = [record["number"] for record in json.loads(made.stdout)["records"]]
    assert numbers == expected[3][-1].tolist()


def test_two_runs_are_compared_step_by_step(lmdb_shards: Path, tmp_path: Path, whole: list[Any]) -> None:
    for name, options in {"all": {}, "kept": {"without": SOME, "gaps": "keep"}}.items():
        with crops_on(lmdb_shards, **RUN, **options) as loader:
            loader.card().save(tmp_path / name)
    words = ["replay", lmdb_shards, "--diff", tmp_path / "all", tmp_path / "kept"]

    told = json.loads(prep_here(*words, "--json").stdout)
    said = prep_here(*words).stdout

    changed = sum(bool({*batch[-1].tolist()} & {*SOME}) for batch in whole)
    assert told["order"] == {"steps": len(whole), "differing": changed, "only_first": SOME, "only_second": []}
    assert f"{changed} of {len(whole)} differ" in said
    assert "6 records: 3, 50, 51, 52, 120, 199" in said


def undeclared(record: Any, rng: np.random.Generator) -> Any:
    """A transform of which the form is found in results."""
    return rng.random(3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_without_records_has_no_form_that_is_not_declared(workers: int, lmdb_shards: Path) -> None:
    options = RUN | {"shuffle": None, "transform": undeclared, "workers": workers}
    with crops_on(lmdb_shards, **options, without=range(32, 48), gaps="keep") as loader:
        for _ in range(2):
            found = epoch_of(loader)
            assert (found[2][0], len(found[2][1])) == ([], 0)
            assert found[1][0].shape == (16, 3)
        assert loader.replay(0, 2).batch[0] == []


def test_steps_that_were_skipped_count_in_comparisons_and_in_replays_of_a_state(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    with crops_on(lmdb_shards, **RUN) as loader, crops_on(lmdb_shards, **RUN) as other:
        before = list(map(kept, islice(loader, 2)))
        for each in (loader, other):
            each.load_state_dict(loader.state_dict())
        (tmp_path / "all").write_text(json.dumps(other.state_dict()))
        loader.skip([3, 4])
        state = loader.state_dict()
        (tmp_path / "skipped").write_text(json.dumps(state))
        parting = loader.parting(other)
    assert parting
    assert (parting.kind, parting.step) == ("order", 3)
    assert parting.because["skipped places"] == ("48-79 of epoch 0", "none")
    told = json.loads(
        prep_here("replay", lmdb_shards, "--diff", tmp_path / "all", tmp_path / "skipped", "--json").stdout
    )
    assert told["parting"]["step"] == 3
    assert len(told["order"]["only_first"]) == 32

    with crops_on(lmdb_shards, **(RUN | {"batch_size": 10})) as loader:
        loader.load_state_dict(state)
        found = [batch[-1].tolist() for batch in map(kept, islice(loader, 4))]
        later = loader.state_dict()
        made = [
            loader.replay(0, step, start=later["start"], passed=later["passed"]).numbers.tolist()
            for step in range(4)
        ]
        loader.load_state_dict(later)
        with pytest.raises(UsageError, match="not a multiple of its steps of 10 records"):
            loader.skip([19])
    (tmp_path / "later").write_text(json.dumps(later))
    shown = json.loads(prep_here("replay", lmdb_shards, "--state", tmp_path / "later", "--json").stdout)

    assert before
    assert made == found
    assert [record["number"] for record in shown["records"]] == found[-1]
