"""The proof of a run: what all ranks got, over restarts, is what the order says; and no log says more."""

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardprep.formats.errors import DataError, OperationError, ShardprepError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.runtime.work_folder import _is_locked
from shardprep.loaders import Loader, LocalShuffle, RunProof, TrainTransform, prove
from shardprep.loaders.loader import run_log
from shardprep.loaders.loader.run_log import RunLog
from shardprep.loaders.loader.signature import Signature, make_signing_keys
from shardprep.loaders.machines.keys import make_keys
from shardprep.loaders.order.receipt import Tally
from support.cut_datasets import collected
from support.datasets import prep_here
from support.file_changes import files_of_at_most
from support.loaded import loader_on
from support.loader_workers import Tagging, reject

RECORDS = 204
RUN: dict[str, Any] = {"shuffle": LocalShuffle(40), "seed": 5, "batch_size": 16, "workers": 0}


def train(
    path: Path,
    log: Path,
    *,
    world: int = 1,
    epochs: int = 1,
    state: Any = None,
    skip: Sequence[int] = (),
    steps: int | None = None,
    **options: Any,
) -> Any:
    """Train all epochs, or so many steps of each, with all ranks; return the last rank's state."""
    for rank in range(world):
        with loader_on(path, rank=rank, world_size=world, **(RUN | options)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.skip(skip)
            for _ in range(epochs):
                list(islice(loader, steps))
                loader.log_epoch(log)
            last = loader.state_dict()
    return last


def stopped(path: Path, folder: Path, **options: Any) -> Any:
    """Deliver two steps to each of two ranks; write the states, return the last."""
    for rank in range(2):
        with loader_on(path, rank=rank, world_size=2, **(RUN | options)) as loader:
            list(islice(loader, 2))
            state = loader.state_dict()
            (folder / f"state-{rank}.json").write_text(json.dumps(state, indent=1))
    return state


@pytest.mark.parametrize(("drop_last", "columns"), [(True, None), (False, ["image"])])
def test_a_whole_run_of_several_ranks_is_proven(
    drop_last: bool, columns: list[str] | None, lmdb_shards: Path, tmp_path: Path
) -> None:
    train(lmdb_shards, tmp_path / "log", world=2, epochs=3, drop_last=drop_last, columns=columns)

    found = prove(lmdb_shards, [tmp_path / "log"])

    cut = RECORDS % 32 if drop_last else 0
    assert [(one.epoch, one.delivered, one.left_out) for one in found.epochs] == [
        (epoch, RECORDS - cut, cut) for epoch in range(3)
    ]
    assert found.statement.splitlines() == [
        f"Each of 204 records of {found.root} is accounted for, exactly once, in each of the epochs 0 to 2.",
        *(f"not delivered in epoch {n}: 12 records after the last full batch." for n in range(3 * drop_last)),
    ]


def test_what_was_left_out_made_or_found_bad_is_named(lmdb_shards: Path, tmp_path: Path) -> None:
    def statement(name: str, path: Path = lmdb_shards, **options: Any) -> tuple[str, RunProof]:
        train(path, tmp_path / name, drop_last=False, **options)
        found = prove(path, [tmp_path / name])
        return found.statement, found

    for gaps in ("close", "keep"):
        said, found = statement(gaps, without=[3, 9], gaps=gaps, transform=None)
        assert (found.epochs[0].omitted, len(found.without)) == (2, 2)
        assert f"left out on purpose: 2 records, {found.without[0]}" in said

    weights = {"part-0": 1.0, "part-1": 3.0}
    cut = collected(lmdb_shards, tmp_path / "cut", 2)
    said, _ = statement("weights", cut, weights=weights, without=[4, 5], gaps="keep", epochs=2)
    assert "204 places" in said

    with loader_on(lmdb_shards) as loader:
        keys = [loader.key(number) for number in (5, 77)]
    said, found = statement("bad", transform=Tagging(dict.fromkeys(keys, reject)), on_bad_record="skip")
    assert ({*found.epochs[0].bad}, "exactly once, in epoch 0." in said) == ({*keys}, True)

    for rank, size in enumerate((8, 9)):
        options = RUN | {"rank": rank, "world_size": 2, "drop_last": False}
        with loader_on(lmdb_shards, transform=TrainTransform(size), **options) as loader:
            list(loader)
            loader.log_epoch(tmp_path / "two")
    said = prove(lmdb_shards, [tmp_path / "two"]).statement
    assert "made with 2 different transforms: TrainTransform(8), TrainTransform(9)." in said


def test_a_restart_with_other_ranks_and_skipped_steps_is_proven_with_the_states(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    log, state = tmp_path / "log", stopped(lmdb_shards, tmp_path, drop_last=False)
    # the next one replaces it
    state = train(lmdb_shards, log, state=state, skip=[6, 7], steps=4, drop_last=False)
    train(lmdb_shards, log, state=state, drop_last=False)

    found = prove(lmdb_shards, [tmp_path / "log", tmp_path / "state-0.json", tmp_path / "state-1.json"])

    assert found.epochs[0].skipped_places == ((96, 128),)
    assert found.epochs[0].delivered == RECORDS - 32
    assert "places 96 to 127 skipped on purpose" in found.statement
    with pytest.raises(DataError, match="delivered 140 of 204 records"):
        prove(lmdb_shards, [tmp_path / "log", tmp_path / "state-0.json"])


def test_a_run_that_returns_to_an_earlier_number_of_ranks_or_skips_an_epoch_that_others_began_is_proven(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    state = None
    for world, steps in ((1, 2), (2, 1), (1, 1), (1, None)):
        state = train(lmdb_shards, tmp_path / "log", world=world, steps=steps, state=state)

    assert prove(lmdb_shards, [tmp_path / "log"]).epochs[0].delivered == RECORDS
    for options in ({"steps": 0}, {"world": 2, "batch_size": 64, "skip": [0]}):
        state = train(lmdb_shards, tmp_path / "skipped", state=state, drop_last=True, **options)
    assert prove(lmdb_shards, [tmp_path / "skipped"]).epochs[0].left_out == 76


def test_of_two_logs_with_equal_counts_the_later_one_is_proven(lmdb_shards: Path, tmp_path: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        keys = [loader.key(number) for number in range(188, 204)]  # of the last batches
    transform = Tagging(dict.fromkeys(keys, reject))
    options = {"shuffle": None, "transform": transform, "on_bad_record": "skip", "drop_last": False}
    state = train(lmdb_shards, tmp_path / "early", steps=12, **options)
    train(lmdb_shards, tmp_path / "late", state=state, **options)

    for logs in (["early", "late"], ["late", "early"]):
        found = prove(lmdb_shards, [tmp_path / name for name in logs], save=tmp_path / "merged")
        assert len(found.epochs[0].bad) == 16
        assert prove(lmdb_shards, [tmp_path / "merged"]).epochs == found.epochs


def test_a_log_of_a_release_whose_transform_had_fewer_arguments_is_proven(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    train(lmdb_shards, log := tmp_path / "log", transform=TrainTransform(8))
    value = json.loads(log.read_bytes())
    del value["sha256"], value["card"]["transform"]["arguments"]["lighting"]
    log.write_text(json.dumps(value | {"sha256": hashlib.sha256(canonical_json(value)).hexdigest()}))
    assert prove(lmdb_shards, [log]).records == RECORDS
    value["more"] = float("nan")
    log.write_text(json.dumps(value))
    with pytest.raises(DataError, match="line 1 was changed"):
        prove(lmdb_shards, [log])


def test_a_run_that_went_back_is_proven_as_it_went_on(lmdb_shards: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    state = train(lmdb_shards, tmp_path / "first", steps=3, drop_last=False)
    train(lmdb_shards, log, state=state, drop_last=False)  # the whole epoch, which is abandoned
    shutil.copy(log, tmp_path / "abandoned")
    train(lmdb_shards, log, state=state, skip=[3, 4, 5], drop_last=False)

    found = prove(lmdb_shards, [log], save=tmp_path / "saved")

    assert found.epochs[0].skipped_places == ((48, 96),)
    assert prove(lmdb_shards, [tmp_path / "saved"]).epochs == found.epochs
    for logs in (["saved", "abandoned"], ["abandoned", "saved"]):
        with pytest.raises(DataError, match="differs from another log about rank 0 in epoch 0"):
            prove(lmdb_shards, [tmp_path / name for name in logs])
    # a checkpoint, and the log of its run, which left out the rest of the epoch
    train(lmdb_shards, tmp_path / "rest", state=state, skip=range(3, 13), drop_last=False)
    for logs in (["first", "rest"], ["rest", "first"]):
        assert prove(lmdb_shards, [tmp_path / name for name in logs]).epochs[0].delivered == 48
    train(lmdb_shards, log, steps=2, drop_last=False)  # another run into the same log, which stops early
    with pytest.raises(DataError, match="missing"):
        prove(lmdb_shards, [log])


def test_a_log_has_whole_lines(lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read = tmp_path / "log", run_log.read_small_file
    with Loader(lmdb_shards, batch_size=8, workers=0) as data:
        list(data)
        data.log_epoch(log)
        with files_of_at_most(log.stat().st_size + 100), pytest.raises(OSError, match="too large"):
            data.log_epoch(log)

    monkeypatch.setattr(run_log, "read_small_file", lambda path, _: read(path) if _is_locked(path) else b"")
    assert len(RunLog.load(log).entries) == 1


def test_logs_that_prove_nothing_are_refused(lmdb_shards: Path, hdf5_shards: Path, tmp_path: Path) -> None:
    for name, options in (
        ("whole", {"world": 2}),
        ("other", {"seed": 6, "drop_last": True}),
        ("some", {"without": [9]}),
    ):
        train(lmdb_shards, tmp_path / name, **options)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "half").write_bytes(lines[0])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "torn").write_bytes(lines[0] + lines[1][:-9])
    one = RunLog.load(tmp_path / "other").entries[0]
    replace(one, receipt=replace(one.receipt, delivered=Tally(1 << 62))).append_to(tmp_path / "huge")
    forged = {"delivered": Tally.of(range(12, 204)), "left_out": Tally.of(range(12))}
    replace(one, receipt=replace(one.receipt, **forged)).append_to(tmp_path / "forged")
    replace(one, place=1 << 63).append_to(tmp_path / "beyond")
    one.card.save(tmp_path / "card")
    values = one.to_json()
    for name, part in ("more", {"more": 1}), ("later", {"receipt": values["receipt"] | {"version": 2}}):
        line = values | part | {"sha256": sha256_of(values | part).removeprefix("sha256:")}
        (tmp_path / name).write_text(json.dumps(line))
    one.append_to(tmp_path / "torn")
    assert (tmp_path / "torn").read_bytes().endswith(b"\n" + one.line())

    for names, message in (
        (["half"], "delivered 102 of 204 records.*so 102 or more are missing"),
        (["huge"], "some were delivered more than once"),
        (["forged"], "epoch 0: the receipts left out different records than the run's options"),
        (["beyond"], "its places are 0, 0 and"),
        (["whole", "other"], "differ in seed, 5 and 6; prove each run by itself"),
        (["whole", "some"], "differ in without, None and 1 record with the digest [0-9a-f]{32};"),
        (["empty"], "is empty"),
        (["more"], "line 1 was changed"),
        (["later"], "line 1 has a receipt of version 2, not 1"),
        (["card"], "is neither the log of a run nor a loader's state"),
        (["torn"], "line 2 is not JSON; remove it if"),
    ):
        with pytest.raises((DataError, UnknownVersion), match=message):
            prove(lmdb_shards, [tmp_path / name for name in names])
    with pytest.raises(DataError, match="the root"):
        prove(hdf5_shards, [tmp_path / "whole"])
    for logs, message in ("whole", r"list of paths, such as \['whole'\]"), ([], "there is no log"):
        with pytest.raises(UsageError, match=message):
            prove(lmdb_shards, logs)


def test_chosen_records_too_many_for_a_log_are_given_again(
    lmdb_shards: Path, hdf5_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardprep.loaders.loader.run_card.MAX_LISTED", 9)
    kept, gone, log = np.arange(100), np.arange(20, 40), tmp_path / "log"
    np.save(tmp_path / "kept.npy", kept)
    np.save(tmp_path / "gone.npy", gone)
    train(lmdb_shards, log, records=kept, without=gone, gaps="keep")

    found = prove(lmdb_shards, [log], records=kept, without=gone)
    files = ["--subset", tmp_path / "kept.npy", "--without", tmp_path / "gone.npy"]
    assert prep_here("prove", lmdb_shards, log, *files).stdout == f"{found.statement}\n"
    assert (found.records, len(found.without)) == (100, 20)
    assert found.statement.startswith("Each of 100 of 204 records, a subset, of sha256:")
    with pytest.raises(UsageError, match="does not list the 100 records of --subset"):
        prove(lmdb_shards, [log], without=gone)
    with pytest.raises(UsageError, match="without must be those of the run"):
        prove(lmdb_shards, [log], records=kept, without=gone[1:])
    with pytest.raises(DataError, match="the run used the dataset with the root"):
        prove(hdf5_shards, [log])
    assert "the run used the data" in prep_here("replay", hdf5_shards, "--card", log, "--step", "0").stderr


edits = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3
)


@pytest.fixture(scope="module")
def signed(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pair of keys ``trainer``, a ``log``, and the same log ``signed`` by it."""
    folder = tmp_path_factory.mktemp("signed")
    make_signing_keys(folder / "trainer")
    train(lmdb_shards, folder / "log", without=[3], transform=TrainTransform(8), drop_last=False)
    prove(lmdb_shards, [folder / "log"], save=folder / "signed", key=folder / "trainer.pem")
    return folder


@pytest.mark.parametrize("name", ["log", "signed"])
@given(edits=edits)
@example(edits=[(0, 0, b" ")])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_log_is_refused_or_says_the_same_and_a_signed_one_is_refused(
    name: str, edits: list[tuple[int, int, bytes]], signed: Path, tmp_path: Path
) -> None:
    data = good = (signed / name).read_bytes()
    for place, cut, new in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + cut :]
    (tmp_path / "log").write_bytes(data)
    try:
        parts = RunLog.load(tmp_path / "log").entries
    except ShardprepError:
        assert data != good
        return
    assert name == "log" or data == good
    assert {part.line() for part in parts} == {(signed / "log").read_bytes()}


def test_foreign_lines_behind_a_log_or_its_signature_are_refused_and_a_long_one_is_read(
    signed: Path, tmp_path: Path
) -> None:
    line, signature = lines = (signed / "signed").read_bytes().splitlines(keepends=True)
    signed_twice = b"".join(lines)
    signed_twice += Signature.of(signed_twice, signed / "trainer.pem").line()
    begun = b'{"format": "shardprep signature", '
    unordered = replace(RunLog.load(signed / "log").entries[0], passed=((9, 1),))
    for data, message in (
        (line + signature + line, "has lines after its signature"),
        (signed_twice, "line 2 is neither"),
        (line + signature[:-1] + b" \n", "another form"),
        (unordered.line(), "neither the log of a run nor"),
        (line + line + signature, "was changed: its signature does not match"),
        (line + begun + b'"x": ' + b"[" * 200_000, None),
        (line + begun + b'"version": 1, "public_key": "AA==", "signature": "AA=="}\n', None),
    ):
        (tmp_path / "log").write_bytes(data)
        with pytest.raises(DataError, match=message):
            RunLog.load(tmp_path / "log")
    (tmp_path / "log").write_bytes(line.rstrip() + b" " * (17 << 20) + b"\n")  # larger than any state
    assert len(RunLog.load(tmp_path / "log").entries) == 1


def test_a_signed_log_is_proven_with_its_key_alone(lmdb_shards: Path, signed: Path, tmp_path: Path) -> None:
    other = make_signing_keys(tmp_path / "other")
    key = make_signing_keys(tmp_path / "other", overwrite=True)

    found = prove(lmdb_shards, [signed / "signed"], signed_by=signed / "trainer.pub.pem")

    assert prove(lmdb_shards, [signed / "signed"]) == found
    assert found.statement.endswith(f"signed by the key {found.signers[0]}.")
    assert other.fingerprint != key.fingerprint
    with pytest.raises(DataError, match=f"by another key: {found.signers[0]}, not {key.fingerprint}"):
        prove(lmdb_shards, [signed / "signed"], signed_by=key.public)
    with pytest.raises(DataError, match="is not signed"):
        prove(lmdb_shards, [signed / "signed", signed / "log"], signed_by=signed / "trainer.pub.pem")


def test_logs_of_ranks_and_states_become_a_signed_log(
    lmdb_shards: Path, signed: Path, tmp_path: Path
) -> None:
    state = stopped(lmdb_shards, tmp_path)
    for rank in range(3):
        with loader_on(lmdb_shards, rank=rank, world_size=3, **RUN) as loader:
            loader.load_state_dict(state)
            for _ in range(2):  # the first log of an epoch counts less than the last
                loader.log_epoch(tmp_path / f"log-{rank}")
                list(loader)
            loader.log_epoch(tmp_path / f"log-{rank}")
    logs = sorted(tmp_path.iterdir())
    expected = prove(lmdb_shards, logs, save=tmp_path / "merged", key=signed / "trainer.pem")

    found = prove(lmdb_shards, [tmp_path / "merged"], signed_by=signed / "trainer.pub.pem")

    assert found.epochs == expected.epochs
    assert [epoch.epoch for epoch in found.epochs] == [0, 1]
    assert len((tmp_path / "merged").read_bytes().splitlines()) == 2 + 3 + 3 + 1


def test_keys_that_cannot_be_used_are_named(signed: Path, tmp_path: Path) -> None:
    log = RunLog.load(signed / "log")
    (readable := tmp_path / "readable.pem").write_bytes((signed / "trainer.pem").read_bytes())
    readable.chmod(0o644)
    (noise := tmp_path / "noise.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    noise.chmod(0o600)
    for key, message in (
        (readable, "chmod 600"),
        (noise, "is not the secret half"),
        (signed / "trainer.pub.pem", "ends in .pem, not in .pub.pem"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "none.pem", "prep keygen --signing"),
    ):
        with pytest.raises(ShardprepError, match=message):
            log.save(tmp_path / "saved", key=key)
    with pytest.raises(UsageError, match="is not the public half"):
        prove(tmp_path, [signed / "signed"], signed_by=signed / "trainer.pem")
    with pytest.raises(UsageError, match="exists already"):
        make_signing_keys(signed / "trainer")
    with pytest.raises(UsageError, match="give save"):
        prove(tmp_path, [signed / "signed"], key=signed / "trainer.pem")
    assert not (tmp_path / "saved").exists()


def test_no_key_no_file_of_the_dataset_and_no_signed_log_is_overwritten(
    lmdb_shards: Path, signed: Path, tmp_path: Path
) -> None:
    keys = make_signing_keys(tmp_path / "own")
    (link := tmp_path / "link").symlink_to(keys.secret)
    for save in (keys.secret, link, lmdb_shards / "manifest.json", lmdb_shards / "log"):
        with pytest.raises(UsageError, match="save the log under another name"):
            prove(lmdb_shards, [signed / "log"], save=save, key=keys.secret)
    public = signed / "trainer.pub.pem"
    with pytest.raises(UsageError, match="save the log under another name"):
        prove(lmdb_shards, [signed / "signed"], save=public, signed_by=public)
    assert keys.secret.read_bytes().startswith(b"-----BEGIN PRIVATE KEY")

    (log := tmp_path / "log").write_bytes((signed / "signed").read_bytes())
    with pytest.raises(UsageError, match="is signed; save the log under another name"):
        prove(lmdb_shards, [log], save=log)
    prove(lmdb_shards, [log], save=log, key=signed / "trainer.pem")
    with loader_on(lmdb_shards, **RUN) as loader, pytest.raises(UsageError, match="log to another file"):
        loader.log_epoch(log)
    assert RunLog.load(log).signer


def test_each_entry_of_a_log_has_its_own_choice_of_records(lmdb_shards: Path, tmp_path: Path) -> None:
    train(lmdb_shards, tmp_path / "log", epochs=2)
    train(lmdb_shards, tmp_path / "log", without=[1, 2])

    log = RunLog.load(tmp_path / "log")
    assert [log.card_of(entry).gaps for entry in log.entries] == [None, None, "close"]


@pytest.mark.parametrize("make", [make_signing_keys, make_keys])
def test_a_pair_of_keys_that_cannot_be_written_leaves_the_old_secret(make: Any, tmp_path: Path) -> None:
    pair = make(tmp_path / "own")
    before = pair.secret.read_bytes()
    pair.public.unlink()
    pair.public.mkdir()

    with pytest.raises(OperationError, match=f"{pair.public}: is not a regular file"):
        make(tmp_path / "own", overwrite=True)

    assert pair.secret.read_bytes() == before


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_openssl_checks_the_signature(signed: Path, tmp_path: Path) -> None:
    *lines, last = (signed / "signed").read_bytes().splitlines(keepends=True)
    (tmp_path / "lines").write_bytes(b"".join(lines))
    (tmp_path / "signature").write_bytes(base64.b64decode(json.loads(last)["signature"]))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", signed / "trainer.pub.pem"]
    command += ["-in", tmp_path / "lines", "-sigfile", tmp_path / "signature"]

    said = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "Verified Successfully" in said.stdout


def test_the_commands_sign_and_check(lmdb_shards: Path, signed: Path, tmp_path: Path) -> None:
    made = json.loads(prep_here("keygen", tmp_path / "team", "--signing", "--json").stdout)
    log, saved = signed / "log", tmp_path / "run.jsonl"

    first = prep_here("prove", lmdb_shards, log, "--save", saved, "--key", tmp_path / "team.pem")
    good = prep_here("prove", lmdb_shards, saved, "--signed-by", made["public"], "--json")
    bad = prep_here("prove", lmdb_shards, saved, "--signed-by", signed / "trainer.pub.pem")
    alone = prep_here("prove", lmdb_shards, log, "--key", tmp_path / "team.pem")

    assert (first.returncode, good.returncode, bad.returncode, alone.returncode) == (0, 0, 1, 2)
    assert json.loads(good.stdout)["signers"] == [made["fingerprint"]]
    assert Path(made["secret"]).stat().st_mode & 0o777 == 0o600
