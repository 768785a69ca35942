"""Runs that differ in nothing but the records and the steps that are left out of them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import FakeData, GlobalShuffle, Loader, LocalShuffle, Receipt
from shardprep.loaders.loader.run_card import RunCard
from shardprep.loaders.loader.run_log import RecordedRun
from support.cut_datasets import collected
from support.datasets import prep_here
from support.loaded import assert_same, crops_on, epoch_of, kept, numbers_in

RECORDS = 204
SOME = [3, 50, 51, 52, 120, 199]
RUN: dict[str, Any] = {"shuffle": LocalShuffle(40), "seed": 5, "batch_size": 16, "drop_last": False}


def rows(batches: list[Any], numbers: list[int]) -> list[Any]:
    """The rows of these records in the order of the batches: pixels, label and number."""
    return [
        tuple(np.asarray(part[row]).tobytes() for part in batch)
        for batch in batches
        for row in range(len(batch[-1]))
        if int(batch[-1][row]) in numbers
    ]


@pytest.fixture(scope="module")
def whole(lmdb_shards: Path) -> list[Any]:
    """An epoch of all records."""
    with crops_on(lmdb_shards, **RUN) as loader:
        return epoch_of(loader)


def test_all_other_records_keep_their_order_and_pixels(lmdb_shards: Path, whole: list[Any]) -> None:
    others = sorted({*range(RECORDS)} - {*SOME})
    with crops_on(lmdb_shards, **RUN, without=SOME, workers=2) as loader:
        found = epoch_of(loader)
        loader.receipt().check(RECORDS, omitted=len(SOME))
        assert len(loader.records) == RECORDS  # a receipt counts places in all of them
        assert f"without {len(SOME)} of them" in repr(loader)

    assert {len(batch[-1]) for batch in found[:-1]} == {16}
    assert rows(found, others) == rows(whole, others)


def test_kept_gaps_make_batches_shorter_by_the_records_alone(lmdb_shards: Path, whole: list[Any]) -> None:
    gone = sorted({*SOME, *whole[2][-1].tolist()})  # all of one batch among them
    with crops_on(lmdb_shards, **RUN, without=gone, gaps="keep") as loader:
        found = epoch_of(loader)
        loader.receipt().check(RECORDS, omitted=len(gone))
        assert loader.batch_specs
        assert all(spec.shape[0] is None for spec in loader.batch_specs)

    assert len(found) == len(whole)
    for short, full in zip(found, whole, strict=True):
        keep = ~np.isin(full[-1], gone)
        assert_same([short], [tuple(part[keep] for part in full)])


def test_masks_numbers_and_keys_are_the_same_choice(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        identity, keys = loader.identity, [loader.key(number) for number in SOME]
    for form in (np.isin(np.arange(RECORDS), SOME), np.array(SOME, np.uint16), keys, np.array(keys)):
        with crops_on(lmdb_shards, **RUN, without=form) as loader:
            assert loader.identity == identity
    with crops_on(lmdb_shards, **RUN, without=[]) as none, crops_on(lmdb_shards, **RUN) as plain:
        assert none.identity == plain.identity != identity


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


def test_weights_keep_gaps_only(lmdb_shards: Path, tmp_path: Path) -> None:
    path = collected(lmdb_shards, tmp_path / "cut", 2)
    weights = {"part-0": 1.0, "part-1": 3.0}
    with pytest.raises(UsageError, match="not possible with weights"):
        crops_on(path, without=[1], weights=weights)
    with crops_on(path, without=SOME, gaps="keep", weights=weights, drop_last=False) as loader:
        for _ in range(2):
            assert not {*numbers_in(epoch_of(loader))} & {*SOME}
            receipt = loader.receipt()
            receipt.check(RECORDS, omitted=receipt.omitted.count)


def test_a_state_is_refused_by_a_run_without_other_records(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        state = loader.state_dict()
    for options in ({}, {"without": SOME[1:]}, {"without": SOME, "gaps": "keep"}):
        with (
            crops_on(lmdb_shards, **RUN, **options) as other,
            pytest.raises(UsageError, match=r"another dataset.* without= count as well"),
        ):
            other.load_state_dict(state)


def test_skipped_steps_are_left_out_after_a_resume_by_other_ranks(
    lmdb_shards: Path, whole: list[Any]
) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        before = list(map(kept, islice(loader, 3)))
        state = loader.state_dict()
    with crops_on(lmdb_shards, **RUN) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        loader.skip(range(5, 8))
        assert len(loader) == len(whole) - 3 - 3
        middle = list(map(kept, islice(loader, 1)))
        state, first = loader.state_dict(), loader.receipt()
    assert_same(before + middle, whole[:4])
    assert state["passed"] == [[5 * 16, 8 * 16]]

    found, receipts = [], [first]
    for rank in range(2):
        options = RUN | {"batch_size": 8, "rank": rank, "world_size": 2}
        with crops_on(lmdb_shards, **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            found.append(numbers_in(epoch_of(loader)))
            receipts.append(loader.receipt())
    rest = numbers_in([whole[4], *whole[8:]])
    assert sorted(found[0] + found[1]) == sorted(rest)
    assert found[0][:8] + found[1][:8] == whole[4][-1].tolist()
    merged = Receipt.merge([Receipt.from_json(each.to_json()) for each in receipts])
    merged.check(RECORDS, omitted=48)
    assert "48 on purpose" in repr(merged)


def test_skipping_holds_for_one_epoch_and_leaves_replays_alone(lmdb_shards: Path, whole: list[Any]) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        loader.skip([0, 2])
        assert_same(epoch_of(loader), [whole[1], *whole[3:]])
        assert "passed" not in loader.state_dict()
        assert len(epoch_of(loader)) == len(whole)
        assert_same([loader.replay(0, 2).batch], [whole[2]])


def test_steps_that_have_gone_by_cannot_be_skipped(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        list(islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="step 2 begins before"):
            loader.skip([2, 3])
        loader.skip([3])
        for changed in ([[1]], [[5, 4]], "all", [[0, RECORDS + 1]], [[True, 3]]):
            state = loader.state_dict() | {"passed": changed}
            with pytest.raises(UsageError, match="its passed steps"):
                loader.load_state_dict(state)


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


def test_old_cards_are_read_and_plain_ones_written_as_before(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN) as loader:
        value = loader.card().to_json()
    assert "without" not in value
    assert RunCard.from_json(value).without is None
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        value = loader.card().to_json()
    for wrong in (value | {"gaps": None}, value | {"without": None}, value | {"gaps": "open"}):
        with pytest.raises(Exception, match="damaged run card"):
            RunCard.from_json(wrong)
    assert RecordedRun(RunCard.from_json(value)).card.gaps == "close"


def test_two_runs_are_compared_step_by_step(lmdb_shards: Path, tmp_path: Path, whole: list[Any]) -> None:
    for name, options in {"all": {}, "kept": {"without": SOME, "gaps": "keep"}}.items():
        with crops_on(lmdb_shards, **RUN, **options) as loader:
            loader.card().save(tmp_path / name)
    words = ["replay", lmdb_shards, "--diff", tmp_path / "all", tmp_path / "kept"]

    told = json.loads(prep_here(*words, "--json").stdout)
    said = prep_here(*words).stdout

    changed = sum(bool({*batch[-1].tolist()} & {*SOME}) for batch in whole)
    assert told["order"] == {
        "steps": len(whole),
        "differing": changed,
        "only_first": SOME,
        "only_second": [],
    }
    assert f"{changed} of {len(whole)} differ" in said
    assert "6 records: 3, 50, 51, 52, 120, 199" in said


def test_the_mixing_of_kept_gaps_is_that_of_full_batches(lmdb_shards: Path) -> None:
    with (
        crops_on(lmdb_shards, **RUN) as plain,
        crops_on(lmdb_shards, **RUN, without=range(0, RECORDS, 3), gaps="keep") as kept,
    ):
        assert kept.shuffle_quality() == plain.shuffle_quality()


def test_what_is_left_of_a_class_is_mixed_as_a_subset_of_it_is(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards) as loader:
        labels = loader.dataset.index["label"]
    run = RUN | {"shuffle": GlobalShuffle()}
    with (
        crops_on(lmdb_shards, **run, without=labels < 2) as closed,
        crops_on(lmdb_shards, **run, records=labels >= 2) as subset,
    ):
        assert closed.shuffle_quality().classes.expected == subset.shuffle_quality().classes.expected
        assert str(closed.shuffle_quality()).startswith("As good as a full shuffle")


def test_keys_are_taken_as_an_index_or_a_table_has_them(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        keys = loader.dataset.index["key"][SOME]
        identity = loader.identity
    for form in (keys, np.array([key.decode() for key in keys], object)):
        with crops_on(lmdb_shards, **RUN, without=form) as loader:
            assert loader.identity == identity


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


@pytest.mark.parametrize("steps", [3, None, [1.5], ["1"]])
def test_steps_are_a_list_of_numbers(steps: Any, lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, **RUN) as loader, pytest.raises(UsageError, match="steps must be a list"):
        loader.skip(steps)


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


def test_made_up_data_skip_steps_too() -> None:
    with FakeData(6, batch_size=4, size=(8, 8)) as data:
        data.skip([0, 5])

        assert len(data) == len(list(data)) == 4
        data.receipt().check(24, omitted=8)
