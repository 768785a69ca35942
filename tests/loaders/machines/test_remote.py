"""Batches from other machines are those of local iteration, each exactly once, whatever machines fail."""

import importlib
import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.frames import FrameReceiver, send_batches
from shardprep.loaders.machines import link, reception, serve as sending
from shardprep.loaders.machines.ledger import LEASE_STEPS, SenderFailed
from shardprep.loaders.machines.reception import Receiver
from shardprep.loaders.machines.socket import Message
from shardprep.loaders.machines.wire import Hello
from shardprep.loaders.remote import NotAdmitted, Refused, RemoteSource, WrongReceiver, serve
from support.key_files import KeyFolder
from support.remote_ends import (
    ANY_PORT,
    SOURCES,
    TIMEOUT_S,
    Tunnel,
    loader,
    locally,
    numbers,
    programs,
    same,
    serving,
    wired,
)
from support.sampling import torture_except
from support.scripts import line_of
from support.waiting import interrupt, until

ALL = ["loader", "loader_with_workers", "dropping_loader", "numbers", "joined", "odd_ones"]
ALL += ["in_parts", "flows_in_parts"]
SOME = ("loader", "numbers", "joined", "odd_ones", "in_parts", "flows_in_parts")


# Batches


@pytest.mark.slow
@pytest.mark.parametrize("senders", torture_except([1, 2, 3], 1, 3))
@pytest.mark.parametrize("name", torture_except(ALL, *SOME))
def test_the_batches_are_those_of_local_iteration(name: str, senders: int, lmdb_shards: Path) -> None:
    expected = locally(name, lmdb_shards, passes=2)
    with wired(partial(SOURCES[name], lmdb_shards), senders=senders) as source:
        for batches in expected:
            assert same(list(source), batches)
            records = 204 if "loader" in name else len(batches)
            if "in_parts" not in name:  # whose steps have gaps
                source.receipt().check(records, left_out=4 if name == "dropping_loader" else 0)
        stats = source.stats()
    assert stats.batches == sum(map(len, expected))
    assert (stats.rejected, stats.refused) == (0, ())
    # a sender that others wait for, on a busy machine, loses its leases, and may have sent their steps
    assert senders > 1 or not stats.leases_given_again
    assert stats.stale + stats.repeated <= LEASE_STEPS * stats.leases_given_again


@pytest.mark.parametrize("gaps", ["close", "keep"])
@pytest.mark.parametrize("without", [[1, 2, 150], [201, 202, 203]])
def test_records_left_out_are_in_the_receipt(gaps: str, without: list[int], lmdb_shards: Path) -> None:
    made = partial(loader, lmdb_shards, without=without, gaps=gaps)
    with made() as local:
        expected = [tuple(part.copy() for part in batch) for batch in local]
        receipt = local.receipt()
    with wired(made) as source:
        assert same(list(source), expected)
        assert source.receipt() == receipt
        source.receipt().check(204, omitted=3)


@pytest.mark.parametrize("name", ["loader", "odd_ones"])
def test_unordered_batches_come_each_once_and_resume(name: str, lmdb_shards: Path) -> None:
    (expected,) = locally(name, lmdb_shards)
    with wired(partial(SOURCES[name], lmdb_shards), senders=3, ordered=False) as source:
        began = iter(source)
        some = [next(began) for _ in range(4)]
        state = json.loads(json.dumps(source.state_dict()))
    with wired(partial(SOURCES[name], lmdb_shards), senders=2, ordered=False) as source:
        source.load_state_dict(state)
        rest = list(source)
        source.receipt().check(204 if name == "loader" else len(expected))
    assert same(sorted([*some, *rest], key=repr), sorted(expected, key=repr))


@pytest.mark.slow
@pytest.mark.parametrize("steps", torture_except([1, 5, "all", "all and more"], 5))
@pytest.mark.parametrize("name", ["loader", "joined", "odd_ones"])
def test_a_state_goes_on_where_it_was_taken(name: str, steps: int | str, lmdb_shards: Path) -> None:
    expected = locally(name, lmdb_shards, passes=2)
    whole = len(expected[0])
    count = steps if isinstance(steps, int) else whole + (steps == "all and more")
    with wired(partial(SOURCES[name], lmdb_shards), senders=2) as source:
        assert same(list(itertools.islice(source, count)), expected[0][:count])
        state = json.loads(json.dumps(source.state_dict()))
    with wired(partial(SOURCES[name], lmdb_shards)) as source:
        source.load_state_dict(state)
        if count < whole:
            assert same(list(source), expected[0][count:])
            source.receipt().check(204 if name == "loader" else whole)
        elif count == whole and name == "odd_ones":
            assert list(source) == []  # the end of the pass was not known yet
        assert same(list(source), expected[1])


@pytest.mark.torture
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("name", ["loader_with_workers", "slow_numbers", "slow_odd_ones"])
def test_going_back_within_a_pass_rejects_no_frame_of_the_senders(
    name: str, senders: int, ordered: bool, lmdb_shards: Path
) -> None:
    (_, expected) = locally(name, lmdb_shards, passes=2)
    with wired(partial(SOURCES[name], lmdb_shards), senders=senders, ordered=ordered) as source:
        began = source.state_dict()
        first = iter(source)
        for _ in range(6):
            next(first)
        source.load_state_dict(source.state_dict())
        assert len(list(source)) == len(expected) - 6
        for _ in zip(range(4), source, strict=False):
            within = source.state_dict()
        for state in (within, began):
            source.load_state_dict(state)
            for _ in zip(range(3), source, strict=False):
                pass
        source.load_state_dict(within)
        rest = list(source)

        assert len(rest) == len(expected) - 4
        assert not ordered or same(rest, expected[4:])
        source.receipt().check(204 if name.startswith("loader") else len(expected))
        stats = source.stats()
        assert (stats.rejected, stats.refused) == (0, ())


def test_a_pass_that_is_left_is_followed_by_the_next_one(lmdb_shards: Path) -> None:
    expected = locally("loader", lmdb_shards, passes=3)
    with wired(lambda: loader(lmdb_shards), senders=2) as source:
        first = iter(source)
        next(first)
        second = iter(source)
        assert same([next(second) for _ in range(3)], expected[1][:3])
        with pytest.raises(UsageError, match="another iteration"):
            next(first)
        assert same(list(source), expected[2])


def test_a_remote_source_is_a_source_of_inputs(lmdb_shards: Path) -> None:
    pytest.importorskip("tensorflow")
    queue_input = importlib.import_module("shardprep.loaders.tf_inputs").QueueInput
    (expected, following) = locally("loader", lmdb_shards, passes=2)
    with wired(lambda: loader(lmdb_shards), senders=2) as source:
        with queue_input(source) as batches:
            came = [tuple(part.numpy() for part in batch) for batch in batches]
            state = batches.state_dict()
        source.load_state_dict(state)
        assert same(came, expected)
        assert same(list(source), following)
        assert source.batches_never_change


# Senders and receivers that start and stop


@pytest.mark.parametrize(
    "name", torture_except(["slow_numbers", "slow_odd_ones", "slowly_in_parts"], "slow_odd_ones")
)
def test_killed_senders_lose_no_batch_and_are_logged(
    name: str, lmdb_shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = locally(name, lmdb_shards)
    with RemoteSource(ANY_PORT) as source, programs(3, name, lmdb_shards, source.endpoint) as senders:
        for process in senders:
            assert line_of(process) == "ready"
        came = []
        for number, batch in enumerate(source):
            came.append(batch)
            if number in (3, 9):
                busiest = max(source.stats().senders, key=lambda sender: sender.lag)
                (process,) = [each for each in senders if busiest.name.endswith(f":{each.pid}")]
                process.kill()
        assert same(came, expected)
        if name != "slowly_in_parts":
            source.receipt().check(len(expected))
        assert source.stats().rejected == 0
        assert source.stats().leases_given_again > 0
    lost = [message.split(";")[1] for message in caplog.messages if " was lost" in message]
    assert lost[0] == " 2 senders left"  # the epoch may end before the other loss is noticed


@pytest.mark.torture
def test_a_sender_killed_in_the_middle_of_a_batch_loses_none(lmdb_shards: Path) -> None:
    with RemoteSource(ANY_PORT) as source, programs(3, "large_ones", "-", source.endpoint) as senders:
        came = []
        for number, batch in enumerate(source):
            came.append(set(batch[::1000].tolist()))
            if number in (0, 10):
                senders[number // 10].kill()
        assert came == [{n} for n in range(30)]
        assert source.stats().rejected == 0


@pytest.mark.torture
@pytest.mark.parametrize("name", torture_except(["slow_numbers", "slow_odd_ones"], "slow_numbers"))
def test_a_stopped_sender_is_replaced_and_may_continue(name: str, lmdb_shards: Path) -> None:
    (expected,) = locally(name, lmdb_shards)
    with (
        RemoteSource(ANY_PORT, lease_seconds=0.5) as source,
        programs(1, name, lmdb_shards, source.endpoint) as (sleeper,),
    ):
        began = iter(source)
        came = [next(began), next(began)]
        sleeper.send_signal(signal.SIGSTOP)
        with serving(partial(SOURCES[name], lmdb_shards), source.endpoint), source:
            came += [next(began) for _ in range(16)]
            assert source.stats().leases_given_again > 0
            sleeper.send_signal(signal.SIGCONT)
            came += list(began)
            assert same(came, expected)
            source.receipt().check(len(expected))
            assert same(list(source), expected)
            assert source.stats().rejected == 0
        assert sleeper.wait(TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("back", torture_except([True, False], True), ids=["to it", "to the receiver"])
def test_a_sender_goes_on_after_damage_on_the_way(back: bool, keys: KeyFolder) -> None:
    with (
        RemoteSource(ANY_PORT, keys=keys.receiver, lease_seconds=1) as source,
        Tunnel(source.endpoint) as tunnel,
        serving(partial(SOURCES["slow_numbers"], Path()), tunnel.endpoint, keys=keys.sender()) as (sent,),
        source,
    ):
        for place, _ in enumerate(source):
            if place in (5, 15):
                tunnel.flip(back=back)
        source.receipt().check(30)
        source.close()
        assert sent.result(TIMEOUT_S).connections > 1


@pytest.mark.parametrize("name", torture_except(["slow_numbers", "slow_odd_ones", "loader"], "slow_numbers"))
def test_senders_go_on_with_a_receiver_that_was_started_again(name: str, lmdb_shards: Path) -> None:
    expected = locally(name, lmdb_shards, passes=2)
    with RemoteSource(ANY_PORT) as first:
        endpoint = first.endpoint
        with serving(partial(SOURCES[name], lmdb_shards), endpoint, senders=2, patience=TIMEOUT_S) as sent:
            with suppress(ZeroDivisionError), first:
                began = iter(first)
                came = [next(began) for _ in range(5)]
                while len(first.stats().senders) < 2:  # or a late one would meet the second receiver only
                    time.sleep(0.1)
                    came.append(next(began))
                state = first.state_dict()
                raise ZeroDivisionError  # the training fails
            time.sleep(0.3)
            with RemoteSource(endpoint) as second:
                second.load_state_dict(state)
                assert same([*came, *second], expected[0])
                second.receipt().check(204 if name == "loader" else len(expected[0]))
                assert same(list(second), expected[1])
                while len(second.stats().senders) < 2:  # or a late one would wait for a third receiver
                    list(second)
            assert {future.result(TIMEOUT_S).connections for future in sent} == {2}


@pytest.mark.slow
def test_the_log_says_once_that_no_sender_or_receiver_is_there_or_that_no_batch_arrives(
    lmdb_shards: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "NO_SENDER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(reception, "NO_BATCH_TIMEOUT_S", 0.1)
    slow = Flow.from_callable(lambda: time.sleep(2) or range(15))
    with monkeypatch.context() as patch, numbers(lmdb_shards) as own:
        patch.setattr(sending, "NO_RECEIVER_TIMEOUT_S", 0.0)
        with pytest.raises(OperationError):
            serve(own, "tcp://127.0.0.1:1", patience=0.5)
    with RemoteSource(ANY_PORT) as source:
        assert "no sender is connected" in str(source.stats())
        with serving(lambda: time.sleep(1) or slow, source.endpoint, name="d1"), source:
            assert len(list(source)) == 15
    told = [message.split(": no ")[1].split(";")[0] for message in caplog.messages]
    assert told == ["receiver is there", "sender is connected", "batch has arrived for 0.1 s from d1"]


# Refused senders


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "seed": (lambda path: loader(path, seed=1), "seed is '1' instead of '0'"),
    "shuffle": (lambda path: loader(path, shuffle=None), "shuffle is 'null'"),
    "flow": (numbers, "identity is"),
    "subset": (lambda path: loader(path, records=range(203)), "records:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_a_sender_with_other_batches_is_refused_with_a_reason(other: str, lmdb_shards: Path) -> None:
    make, reason = OTHERS[other]
    with wired(lambda: loader(lmdb_shards)) as source:
        began = iter(source)
        next(began)
        with serving(lambda: make(lmdb_shards), source.endpoint, name="wrong") as (sent,):
            while not sent.done() and next(began, None):
                time.sleep(0.02)
            with pytest.raises(Refused, match=reason):
                sent.result(TIMEOUT_S)
        ((name, told),) = source.stats().refused
        assert name == "wrong"
        assert reason in told


def test_a_state_determines_which_senders_are_admitted(lmdb_shards: Path) -> None:
    with wired(lambda: loader(lmdb_shards)) as source:
        next(iter(source))
        state = source.state_dict()
    with RemoteSource(ANY_PORT) as source, serving(lambda: numbers(lmdb_shards), source.endpoint), source:
        next(iter(source))
        with pytest.raises(UsageError, match="identity is"):
            source.load_state_dict(state)
    with RemoteSource(ANY_PORT) as source, serving(lambda: loader(lmdb_shards), source.endpoint) as _, source:
        source.load_state_dict(state)
        with serving(lambda: numbers(lmdb_shards), source.endpoint) as (sent,):
            assert len(list(source)) == 20
            assert len(list(source)) == 21
            with pytest.raises(Refused):
                sent.result(TIMEOUT_S)


def test_senders_without_an_allowed_key_are_not_admitted_and_all_others_are(
    keys: KeyFolder, lmdb_shards: Path
) -> None:
    made = partial(SOURCES["slow_numbers"], lmdb_shards)
    with (
        RemoteSource(ANY_PORT, keys=keys.receiver) as source,
        serving(made, source.endpoint, keys=keys.sender("data1")) as (removed,),
    ):
        began = iter(source)
        came = [next(began), next(began)]
        for given in (keys.sender("stranger"), None):
            with pytest.raises(NotAdmitted):
                serve(made(), source.endpoint, keys=given)
        with pytest.raises(WrongReceiver, match=r"a different key from data2\.key"):
            serve(made(), source.endpoint, keys=keys.sender(receiver="data2"))
        keys.disallow("data1")
        source.reload_keys()
        with serving(made, source.endpoint, keys=keys.sender("data2")), source:
            came += list(began)
            assert same(came, locally("slow_numbers", lmdb_shards)[0])
            assert [sender.key for sender in source.stats().senders] == ["data2"]
            assert source.stats().not_admitted >= 2
            with pytest.raises(Refused, match="allow-list"):
                removed.result(TIMEOUT_S)


STATE = {"version": 1, "pass": 0, "step": 0, "taken": []}
NO_STATES = [None, {}, {"version": 2}, STATE | {"pass": -1}, STATE | {"pass": True}, STATE | {"taken": None}]
NO_STATES += [STATE | {"receipt": {}}, STATE | {"terms": {"facts": 1}}]


def test_what_is_no_state_is_refused() -> None:
    with RemoteSource(ANY_PORT) as source:
        assert source  # before its length is known
        for state in NO_STATES:
            with pytest.raises(UsageError):
                source.load_state_dict(state)


# Errors of the source


def test_an_error_of_a_sender_raises_on_both_sides_and_is_logged_without_its_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    too_large = "1,001 bytes is above the receiver's limit of 1,000"
    cases: list[tuple[Callable[[], Flow], type[Exception], str]] = [
        (lambda: Flow.from_iterable(["text"]), UsageError, "cannot be sent"),
        (lambda: Flow.from_iterable([np.zeros(1001, np.uint8)]), UsageError, too_large),
        (lambda: Flow.from_iterable(["x"]).map(int), ValueError, "invalid literal"),
    ]
    for make, error, says in cases:
        with RemoteSource(ANY_PORT, limit_bytes=1000) as source, serving(make, source.endpoint) as (sent,):
            with pytest.raises(SenderFailed, match=says):
                next(iter(source))
            with pytest.raises(error, match=says):
                sent.result(TIMEOUT_S)
        assert re.search(rf"sender .* failed: (\S*\.)?{error.__name__}: .*{says}", caplog.messages[-1])


@pytest.mark.torture
def test_ctrl_c_on_a_sender_gives_its_leases_back_at_once(lmdb_shards: Path) -> None:
    with (
        RemoteSource(ANY_PORT, lease_seconds=3600) as source,
        programs(2, "slow_numbers", lmdb_shards, source.endpoint) as (one, other),
    ):
        for process in (one, other):
            line_of(process)
        came = []
        for _, number in source:
            came.append(int(number[0]))
            if len(came) == 5:
                one.send_signal(signal.SIGINT)
        assert came == list(range(30))
        _, errors = one.communicate(timeout=TIMEOUT_S)
        assert "KeyboardInterrupt" in errors
        source.close()
        assert other.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(("owner", "name"), [(None, "receive"), (Hello, "read"), (Receiver, "_draw")])
def test_a_receiver_goes_on_where_it_was_after_ctrl_c_while_it_admits_a_sender_or_draws(
    owner: type | None, name: str, lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HELLO_INTERVAL_S", 0.1)
    with wired(partial(numbers, lmdb_shards)) as source, monkeypatch.context() as patch:
        assert source._reception.socket._socket.poll(TIMEOUT_S * 1000)  # the HELLO has arrived
        interrupt(patch, owner or source._reception.socket, name)  # a message that was read is lost
        with pytest.raises(KeyboardInterrupt):
            next(iter(source))
        source.load_state_dict(source.state_dict())
        assert same(list(source), *locally("numbers", lmdb_shards))


def test_ctrl_c_at_any_moment_leaves_a_receiver_usable() -> None:
    receiver = reception.ExclusiveUse("receiver", lambda: None)
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        for _ in range(40):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
                while True:
                    with receiver.use():
                        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_closing_ends_senders_with_an_unread_hello() -> None:
    with (
        RemoteSource(ANY_PORT) as source,
        serving(partial(SOURCES["numbers"], Path()), source.endpoint) as (sent,),
        ExitStack() as stack,
        source,
    ):
        assert len(list(source)) == 15
        (late,) = stack.enter_context(serving(partial(SOURCES["numbers"], Path()), source.endpoint))
        assert source._reception.socket._socket.poll(TIMEOUT_S * 1000)  # the HELLO has arrived
        source.close()
        assert late.result(TIMEOUT_S).batches == 0
        assert sent.result(TIMEOUT_S).batches == 15


def test_a_forked_copy_does_not_draw_and_close_ends_a_waiting_thread() -> None:
    with ThreadPoolExecutor(1) as pool, RemoteSource(ANY_PORT) as source:
        copy = get_context("fork").Process(target=next, args=[iter(source)], daemon=True)
        copy.start()
        copy.join(TIMEOUT_S)
        assert copy.exitcode == 1
        waiting = pool.submit(list, source)
        until(lambda: source.stats().waited)
        with pytest.raises(UsageError, match="another thread"):
            iter(source)
        source.close()
        with pytest.raises(UsageError, match="closed"):
            waiting.result(TIMEOUT_S)


@pytest.mark.slow
def test_time_in_which_the_receiver_is_stopped_is_no_time_of_leases() -> None:
    with ThreadPoolExecutor(1) as pool, RemoteSource(ANY_PORT) as source:
        began, _ = time.monotonic(), pool.submit(list, source)
        until(lambda: source.stats().waited)
        subprocess.run(["sh", "-c", "kill -STOP $PPID; sleep 1; kill -CONT $PPID"], check=True)
        before = source.stats().waited
        until(lambda: source.stats().waited > before)
        assert source.stats().waited < time.monotonic() - began - 0.3


def test_messages_without_end_do_not_delay_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, RemoteSource(ANY_PORT) as source:
        message = Message(b"peer", [zmq.Frame(b"garbage")])
        monkeypatch.setattr(source._reception.socket, "receive", lambda: message)
        drawing = pool.submit(list, source)
        until(lambda: source.stats().rejected)
        source.close()
        with pytest.raises(UsageError, match="closed"):
            drawing.result(TIMEOUT_S)


def test_a_report_that_fails_is_not_an_error_of_the_source() -> None:
    def fail(stats: object) -> None:
        raise OSError("the terminal is gone")

    with wired(partial(SOURCES["numbers"], Path())) as source:
        batches = iter(source)
        with serving(partial(SOURCES["numbers"], Path()), source.endpoint, report=fail, senders=3) as senders:
            for sent in senders:
                with pytest.raises(OSError, match="terminal"):
                    sent.result(TIMEOUT_S)
        assert len(list(batches)) == 15


def test_a_receiver_on_a_path_keeps_it_and_replaces_no_file(tmp_path: Path) -> None:
    endpoint, file = f"ipc://{tmp_path}/wire", tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(OperationError, match="not a socket"):
        RemoteSource(f"ipc://{file}")
    assert file.read_text() == "mine"
    for _ in range(2):
        with wired(partial(SOURCES["numbers"], Path()), endpoint=endpoint) as source:
            with pytest.raises(OperationError, match="listens there already"):
                RemoteSource(endpoint)
            assert len(list(source)) == 15


def test_a_receiver_with_an_ipv6_endpoint_names_its_others_as_they_were_given() -> None:
    with suppress(OperationError), RemoteSource(["tcp://[::1]:*", ANY_PORT]) as source:  # maybe no IPv6 here
        assert source.endpoints[1].startswith("tcp://127.0.0.1:")


def test_a_sender_of_its_own_batches_and_one_of_shared_ones_are_refused_at_the_other_s_receiver() -> None:
    with ThreadPoolExecutor(2) as pool, RemoteSource(ANY_PORT) as source, FrameReceiver(ANY_PORT) as receiver:
        for drawn, send, given in ((source, send_batches, [1]), (receiver, serve, numbers(Path()))):
            pool.submit(list, drawn)
            with pytest.raises(Refused, match="serve"):
                send(given, drawn.endpoint)
            drawn.close()


def test_what_cannot_be_served_is_refused(lmdb_shards: Path) -> None:
    with loader(lmdb_shards, world_size=2) as part, loader(lmdb_shards) as skipping:
        skipping.skip([1])
        for source, says in (([1, 2], "not a list"), (part, "world_size=1"), (skipping, "no skip")):
            with pytest.raises(UsageError, match=says):
                serve(source, ANY_PORT)
