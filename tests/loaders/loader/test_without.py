"""What a run reads: some of the records, shards of its own, or all but some; and what is as it was."""

import json
import shutil
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import inspect, open_dataset, write_dataset
from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, Receipt, SortedByClass
from support.datasets import prep_here
from support.loaded import crops_on, epoch_of, kept, loader_on, numbers_in
from support.sampling import torture_except

RECORDS = 204
SOME = [3, 50, 51, 52, 120, 199]
RUN: dict[str, Any] = {"shuffle": LocalShuffle(40), "seed": 5, "batch_size": 16, "drop_last": False}


@pytest.fixture(scope="module")
def whole(lmdb_shards: Path) -> list[Any]:
    """An epoch of all records."""
    with crops_on(lmdb_shards, **RUN) as loader:
        return epoch_of(loader)


@pytest.mark.parametrize(("option", "shown"), [("without", "without {} of them"), ("records", "{} of 204")])
def test_every_form_of_a_choice_is_the_same_run(lmdb_shards: Path, option: str, shown: str) -> None:
    with crops_on(lmdb_shards, **RUN, **{option: SOME}) as loader:
        identity, keys = loader.identity, loader.dataset.index["key"][SOME]
        assert shown.format(len(SOME)) in repr(loader)
    names = [key.decode() for key in keys]
    numbers = np.isin(np.arange(RECORDS), SOME), np.array(SOME, np.uint16)
    for form in (*numbers, names[::-1] + names, np.array(names), keys, np.array(names, object)):
        with crops_on(lmdb_shards, **RUN, **{option: form}) as loader:
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
        for steps in (3, None, [1.5], ["1"], [True]):
            with pytest.raises(UsageError, match=r"steps must be a (list|whole number)"):
                loader.skip(steps)  # type: ignore[arg-type]
        list(islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="step 2 begins before"):
            loader.skip([2, 3])
        before = loader.state_dict()
        loader.skip([3])
        after = loader.state_dict()
        assert (before["version"], after["version"]) == (1, 2)  # which a release without skip() refuses
        assert before.keys() == after.keys()  # PyTorch's DCP would drop others
        for changed in ([[1]], [[5, 4]], [[4, 4]], "all", [[0, RECORDS + 1]], [[True, 3]]):
            with pytest.raises(UsageError, match="its passed steps"):
                loader.load_state_dict(loader.state_dict() | {"passed": changed})


def test_a_state_and_a_replay_of_it_are_without_them_too(lmdb_shards: Path, tmp_path: Path) -> None:
    with crops_on(lmdb_shards, **RUN, without=SOME) as loader:
        expected, state = epoch_of(loader), loader.state_dict()
    with crops_on(lmdb_shards, **RUN) as plain:
        parting = plain.parting(loader)
    assert parting
    assert parting.kind == "order"
    assert "without" in parting.because
    for options in ({}, {"without": SOME[1:]}, {"without": SOME, "gaps": "keep"}):
        with (
            crops_on(lmdb_shards, **RUN, **options) as other,
            pytest.raises(UsageError, match=r"another dataset.* without= count as well"),
        ):
            other.load_state_dict(state)
    (tmp_path / "state.json").write_text(json.dumps(state))
    np.save(tmp_path / "gone.npy", np.array(SOME))
    words = ["replay", lmdb_shards, "--state", tmp_path / "state.json", "--epoch", 0, "--step", 3]
    refused = prep_here(*words)
    made = prep_here(*words, "--without", tmp_path / "gone.npy", "--json")
    assert refused.returncode == 2
    assert "the run's card or state does not list the 6 records of --without; give the same" in refused.stderr
    assert [record["number"] for record in json.loads(made.stdout)["records"]] == expected[3][-1].tolist()


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


def undeclared(refused: set[str], record: Any, rng: np.random.Generator) -> Any:
    """A transform of which the form is found in results."""
    if record.key in refused:
        raise BadImage("refused", key=record.key)
    return rng.random(3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("gone", [{"without": range(32, 48), "gaps": "keep"}, {"on_bad_record": "skip"}])
def test_a_batch_without_records_has_no_form_that_is_not_declared(
    gone: dict[str, Any], workers: int, lmdb_shards: Path
) -> None:
    with open_dataset(lmdb_shards) as dataset:
        transform = partial(undeclared, {dataset[number].key for number in range(32, 48)})
    options = RUN | {"shuffle": None, "transform": transform, "workers": workers}
    with crops_on(lmdb_shards, **options, **gone) as loader:
        for _ in range(2):
            found = epoch_of(loader)
            assert (found[2][0], len(found[2][1]), found[1][0].shape) == ([], 0, (16, 3))
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
        place = {name: later[name] for name in ("start", "passed")}
        made = [loader.replay(0, step, **place).numbers.tolist() for step in range(4)]
        loader.load_state_dict(later)
        with pytest.raises(UsageError, match="not a multiple of its steps of 10 records"):
            loader.skip([19])
    (tmp_path / "later").write_text(json.dumps(later))
    shown = json.loads(prep_here("replay", lmdb_shards, "--state", tmp_path / "later", "--json").stdout)

    assert before
    assert made == found
    assert [record["number"] for record in shown["records"]] == found[-1]


def test_sizes_in_bytes_are_of_the_records_that_are_read(lmdb_shards: Path, tmp_path: Path) -> None:
    write_dataset([{"x": np.zeros(9000 + n)} for n in range(8)], tmp_path / "items")
    with Loader(lmdb_shards, records=[5], workers=0, batch_size=1) as loader:
        assert loader.stats().image_bytes == loader.dataset.index["length"][5]
    with Loader(tmp_path / "items", shuffle=LocalShuffle("250KB"), workers=0, batch_size=1) as loader:
        assert (loader.card().shuffle, loader.stats().image_bytes > 72_000) == (LocalShuffle(3), True)


SECOND = {"rank": 1, "world_size": 2}


@pytest.mark.parametrize("options", torture_except([{"drop_last": False, "batch_size": 700}, SECOND], SECOND))
def test_the_sample_fits_any_plan(tmp_path: Path, options: dict[str, int]) -> None:
    labels = [label for _ in range(2) for label in range(20) for _ in range(25)]
    items = [{"key": f"{n:05}", "label": label, "n": n} for n, label in enumerate(labels)]
    write_dataset(items, path := tmp_path / "twice")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Loader(path, workers=0, shuffle=LocalShuffle(10), **({"batch_size": 8} | options)).close()

    assert [one.category for one in told] == ([SortedByClass] if "rank" in options else [])


SHUFFLE = LocalShuffle(60, partitions=4)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_a_rank_opens_only_its_shards(lmdb_shards: Path, tmp_path: Path, workers: int) -> None:
    names = [shard.name for shard in open_dataset(lmdb_shards).manifest.shards]
    owned, receipts = [], []
    for rank in range(2):
        with loader_on(lmdb_shards, shuffle=SHUFFLE, rank=rank, world_size=2) as loader:
            owned.append(set(loader.dataset.index["shard"][numbers_in(epoch_of(loader))].tolist()))
    for rank, own in enumerate(owned):
        alone = shutil.copytree(lmdb_shards, tmp_path / str(rank))
        for number in set(range(len(names))) - own:
            (alone / names[number]).unlink()
        assert inspect(alone).records == RECORDS  # which reads no shard
        with loader_on(
            alone, shuffle=SHUFFLE, rank=rank, world_size=2, seed=rank, workers=workers, read_ahead=0
        ) as loader:
            for _ in range(2):  # another epoch, and another seed than that of above
                assert set(loader.dataset.index["shard"][numbers_in(epoch_of(loader))].tolist()) == own
        with loader_on(alone, shuffle=SHUFFLE, rank=rank, world_size=2, workers=workers) as loader:
            epoch_of(loader)
            receipts.append(loader.receipt())

    Receipt.merge(receipts).check(204)
    assert owned[0] | owned[1] == set(range(len(names)))
    assert len(owned[0] & owned[1]) == 1  # the shard that is cut between partitions 1 and 2


def test_a_flow_has_the_records_of_all_partitions_in_turn(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=SHUFFLE, batch_size=204) as loader:
        (numbers,) = [numbers_in([batch]) for batch in loader]
        keys = [loader.key(number) for number in numbers]
    found = [key for key, *_ in Flow.from_dataset(lmdb_shards, shuffle=SHUFFLE, with_keys=True)]

    assert len(keys) == 204
    assert found == [keys[part * 51 + place] for place in range(51) for part in range(4)]
