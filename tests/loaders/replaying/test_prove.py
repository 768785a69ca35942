"""The proof of a run: what all ranks got, over restarts, is what the order says; and no log says more."""

from __future__ import annotations

import errno
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardprep.formats.errors import DataError, ShardprepError, UsageError
from shardprep.loaders import FakeData, LocalShuffle, RunProof, TrainTransform, prove
from shardprep.loaders.loader.run_log import read_log
from support.cut_datasets import collected
from support.datasets import prep_here
from support.loaded import loader_on
from support.loader_workers import Tagging, reject

RECORDS = 204
RUN: dict[str, Any] = {"shuffle": LocalShuffle(40), "seed": 5, "batch_size": 16, "workers": 0}


def train(path: Path, log: Path, *, world: int = 1, epochs: int = 1, **options: Any) -> None:
    """Train all epochs with all ranks."""
    for rank in range(world):
        with loader_on(path, rank=rank, world_size=world, **(RUN | options)) as loader:
            for _ in range(epochs):
                list(loader)
                loader.log_epoch(log)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_whole_run_of_several_ranks_is_proven(drop_last: bool, lmdb_shards: Path, tmp_path: Path) -> None:
    train(lmdb_shards, tmp_path / "log", world=2, epochs=3, drop_last=drop_last)

    found = prove(lmdb_shards, [tmp_path / "log"])

    cut = RECORDS % 32 if drop_last else 0
    assert [(one.epoch, one.delivered, one.left_out) for one in found.epochs] == [
        (epoch, RECORDS - cut, cut) for epoch in range(3)
    ]
    assert found.statement.startswith(
        f"Each of 204 records of {found.root} is accounted for, exactly once, in each of the epochs 0 to 2"
    )
    assert ("12 records after the last full batch" in found.statement) == drop_last


def test_what_was_left_out_on_purpose_is_named(lmdb_shards: Path, tmp_path: Path) -> None:
    for gaps in ("close", "keep"):
        log = tmp_path / gaps
        train(lmdb_shards, log, without=[3, 9], gaps=gaps, drop_last=False)
        found = prove(lmdb_shards, [log])
        assert (found.epochs[0].omitted, len(found.without)) == (2, 2)
        assert f"left out on purpose: 2 records, {found.without[0]}" in found.statement


def test_a_restart_with_other_ranks_and_skipped_steps_is_proven_with_the_states(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    options = RUN | {"drop_last": False}
    for rank in range(2):
        with loader_on(lmdb_shards, rank=rank, world_size=2, **options) as loader:
            list(islice(loader, 2))
            (tmp_path / f"state-{rank}.json").write_text(json.dumps(loader.state_dict()))
    state = json.loads((tmp_path / "state-1.json").read_text())
    with loader_on(lmdb_shards, **options) as loader:
        loader.load_state_dict(state)
        loader.skip([6, 7])
        list(islice(loader, 4))
        state = loader.state_dict()
        loader.log_epoch(tmp_path / "log")  # replaced by what follows
    with loader_on(lmdb_shards, **options) as loader:
        loader.load_state_dict(state)
        list(loader)
        loader.log_epoch(tmp_path / "log")

    found = prove(lmdb_shards, [tmp_path / "log", tmp_path / "state-0.json", tmp_path / "state-1.json"])

    assert found.epochs[0].skipped_places == ((96, 128),)
    assert found.epochs[0].delivered == RECORDS - 32
    assert "places 96 to 127 skipped on purpose" in found.statement
    with pytest.raises(DataError, match="not delivered exactly once: at least 32 of 204"):
        prove(lmdb_shards, [tmp_path / "log", tmp_path / "state-0.json"])


def test_bad_records_are_named(lmdb_shards: Path, tmp_path: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        keys = [loader.key(number) for number in (5, 77)]
    transform = Tagging(dict.fromkeys(keys, reject))
    train(lmdb_shards, tmp_path / "log", transform=transform, on_bad_record="skip", drop_last=False)

    found = prove(lmdb_shards, [tmp_path / "log"])

    assert {*found.epochs[0].bad} == {*keys}


def test_subsets_and_weights_are_proven(lmdb_shards: Path, tmp_path: Path) -> None:
    train(lmdb_shards, tmp_path / "subset", records=np.arange(10, 100), drop_last=False)
    path = collected(lmdb_shards, tmp_path / "cut", 2)
    weights = {"part-0": 1.0, "part-1": 3.0}
    train(path, tmp_path / "weights", weights=weights, without=[4, 5], gaps="keep", drop_last=False, epochs=2)

    assert prove(lmdb_shards, [tmp_path / "subset"]).records == 90
    assert "204 places" in prove(path, [tmp_path / "weights"]).statement


def test_logs_that_prove_nothing_are_refused(lmdb_shards: Path, hdf5_shards: Path, tmp_path: Path) -> None:
    train(lmdb_shards, tmp_path / "whole", world=2)
    train(lmdb_shards, tmp_path / "other", seed=6)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "half").write_bytes(lines[0])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "torn").write_bytes(lines[0] + lines[1][:-9])

    for names, message in (
        (["half"], "at least 102 of 204 records are missing"),
        (["whole", "other"], "another seed"),
        (["empty"], "is empty"),
        (["torn"], "line 2 is not JSON"),
    ):
        with pytest.raises(DataError, match=message):
            prove(lmdb_shards, [tmp_path / name for name in names])
    with pytest.raises(DataError, match="the root"):
        prove(hdf5_shards, [tmp_path / "whole"])
    with loader_on(lmdb_shards, records=np.arange(50), **RUN) as loader:
        list(loader)
        (tmp_path / "state").write_text(json.dumps(loader.state_dict()))
    with pytest.raises(UsageError, match="does not list"):
        prove(lmdb_shards, [tmp_path / "state"])


@pytest.fixture(scope="module")
def proven(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, RunProof]:
    log = tmp_path_factory.mktemp("log") / "log"
    train(lmdb_shards, log, without=[3], transform=TrainTransform(8), drop_last=False)
    return log.read_bytes(), prove(lmdb_shards, [log])


edits = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3
)


@given(edits=edits)
@example(edits=[(0, 0, b" ")])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_log_is_refused_or_says_the_same(
    edits: list[tuple[int, int, bytes]], proven: tuple[bytes, RunProof], tmp_path: Path
) -> None:
    data, expected = proven
    for place, cut, new in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + cut :]
    (tmp_path / "log").write_bytes(data)
    try:
        parts = read_log(tmp_path / "log")
    except ShardprepError:
        return
    assert {part.line() for part in parts} == {proven[0]}
    assert len(expected.epochs) == 1


def test_the_command_says_what_is_proven(lmdb_shards: Path, tmp_path: Path) -> None:
    train(lmdb_shards, tmp_path / "log", epochs=2)

    said = prep_here("prove", lmdb_shards, tmp_path / "log")
    told = json.loads(prep_here("prove", lmdb_shards, tmp_path / "log", "--json").stdout)
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes().replace(b'"seed": 5', b'"seed": 6'))
    refused = prep_here("prove", lmdb_shards, tmp_path / "log")

    assert said.stdout == told["statement"] + "\n"
    assert [epoch["epoch"] for epoch in told["epochs"]] == [0, 1]
    assert refused.returncode == 1
    assert "line 1 was changed" in refused.stderr


def test_a_line_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up takes a part of the line before it fails."""
    write = os.write

    def filling(number: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(number, data[:-50])

    with FakeData(2, batch_size=8) as data:
        for _ in data:
            pass
        monkeypatch.setattr("os.write", filling)
        with pytest.raises(OSError, match="No space left"):
            data.log_epoch(tmp_path / "log")
