"""Frames of peers that are not valid: dropped and counted, and never an error in the training loop."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zmq

from shardprep.loaders.machines import codec
from shardprep.loaders.machines.codec import FrameDamaged, FrameKind, pack_batch, pack_note, read_head
from shardprep.loaders.machines.keys import ReceiverAuth
from shardprep.loaders.machines.ledger import Ledger, StepLease, StepRef, Steps
from shardprep.loaders.machines.reception import MAX_BAD_FRAMES, Reception
from shardprep.loaders.machines.socket import MAX_TEXT_CHARACTERS, Message
from shardprep.loaders.machines.wire import VERSION, Hello, SourceTerms, pack_delivery, read_lease
from shardprep.loaders.order.epoch import LoadedStep
from shardprep.loaders.remote import RemoteSource
from support.frame_changes import Parts, damage_the_parts, flip_a_bit, wired
from support.remote_ends import ANY_PORT, TIMEOUT_S, serving, slow_numbers

STEPS = 40
TERMS = SourceTerms({"dataset": "sha256:1", "seed": "0"}, STEPS, STEPS, picks=True)
LIMIT = 100_000


def hello(name: str = "peer", terms: SourceTerms = TERMS) -> Hello:
    return Hello(name, name, terms, 12)


def batch_of(step: int) -> Any:
    return np.full((2, 3), step), {"label": np.array([step, -step])}


def delivery_of(step: int) -> LoadedStep:
    return LoadedStep(step, batch_of(step), np.array([step]))


class Room:
    """A reception with peers that the test plays: what it sends to each, and the batches it took."""

    def __init__(self) -> None:
        self.said: dict[bytes, list[Any]] = {}
        socket = SimpleNamespace(
            send=self._say, events=lambda: (), receive=lambda: None, endpoint="here", binds=True
        )
        ledger: Ledger[LoadedStep] = Ledger(ahead=12, lease_seconds=60)
        self.reception = Reception(socket, ReceiverAuth(None), ledger, limit=LIMIT)  # type: ignore[arg-type]
        self.reception.begin(0, Steps(total=None))
        self.came: list[Any] = []
        self.session = 0

    def _say(self, parts: Any, *, peer: bytes) -> bool:
        self.said.setdefault(peer, []).append(read_head(parts[0]))
        return True

    def hear(self, peer: bytes, parts: Any) -> None:
        """Handle a message of the peer."""
        self.reception._handle(Message(peer, [zmq.Frame(bytes(part)) for part in parts]))
        self.reception._grant()
        while made := self.reception.take():
            self.came.append(made[0].batch)

    def enter(self, peer: bytes, **given: Any) -> None:
        self.hear(peer, hello(str(peer), **given).pack())
        for head in self.said[peer]:
            if head.kind is FrameKind.WELCOME:
                self.session = head.description["session"]

    def leases(self, peer: bytes) -> list[StepLease]:
        """Return the new leases of this peer."""
        return [read_lease(head) for head in self.said.pop(peer, []) if head.kind is FrameKind.LEASE]

    def good_frames(self, lease: StepLease) -> Iterator[Parts]:
        for step in range(lease.start, lease.stop):
            yield wired(pack_delivery(StepRef(self.session, lease.id, 0, step), delivery_of(step)))

    @property
    def stats(self) -> Any:
        return self.reception.stats()

    def finish(self) -> None:
        """Let an honest peer make the missing steps, and check that each was delivered once."""
        self.enter(b"honest")
        while leases := self.leases(b"honest"):
            for lease in leases:
                for frame in self.good_frames(lease):
                    self.hear(b"honest", frame)
        assert self.reception.steps.is_over
        assert len(self.came) == STEPS
        for step, batch in enumerate(self.came):
            assert wired(pack_batch(batch)) == wired(pack_batch(batch_of(step)))


# Mutations of a good frame


def crafted(head: bytes, **changes: Any) -> bytes:
    """Return a header with other fields, or another description, and a matching checksum."""
    values = list(codec.HEAD.unpack_from(head))
    text = head[codec.HEAD.size + 4 :]
    if "description" in changes:
        text = json.dumps(changes.pop("description")).encode()
        values[6] = len(text)
    names = ("magic", "version", "kind", "zero", "number", "parts", "length")
    for name, value in changes.items():
        values[names.index(name)] = value
    fixed = codec.HEAD.pack(*values)
    return fixed + struct.pack("<I", google_crc32c.value(fixed + text)) + text


def change_the_head(frame: Parts, chance: random.Random) -> Parts:
    name, width = chance.choice(
        [("version", 8), ("kind", 8), ("zero", 16), ("number", 64), ("parts", 32), ("length", 32)]
    )
    return [crafted(frame[0], **{name: chance.getrandbits(width)}), *frame[1:]]


def say_other_numbers(frame: Parts, chance: random.Random) -> Parts:
    """Change session, pass or step, with a matching checksum."""
    meta = np.frombuffer(frame[1], np.int64).copy()
    meta[chance.choice([0, 2, 3])] += chance.choice([-(2**40), -1, 1, 2, 40, 2**40])
    return with_part(frame, 0, meta.tobytes())


def with_part(frame: Parts, place: int, data: bytes) -> Parts:
    description = read_head(frame[0]).description
    description["tuple"][place]["crc32c"] = google_crc32c.value(data)
    return [crafted(frame[0], description=description), *frame[1 : place + 1], data, *frame[place + 2 :]]


def say_something_else(frame: Parts, chance: random.Random) -> Parts:
    """Return a frame without arrays, with valid or other values."""
    values: list[Any] = [-1, 0, 1, 2**63, 2**70, "", "text" * 3000, [1], None, True, {"a": {}}, 1.5]
    names = ["session", "lease", "pass_number", "start", "stop", "limit", "wants"]
    names += ["name", "instance", "terms", "text"]
    notes = {name: chance.choice(values) for name in names if chance.random() < 0.5}
    kind = chance.choice([kind for kind in FrameKind if kind not in (FrameKind.STOP, FrameKind.CREDIT)])
    return wired(pack_note(kind, chance.choice([0, 1, VERSION, 2**63, STEPS]), **notes))


MUTATIONS: list[Callable[[Parts, random.Random], Parts]] = [
    flip_a_bit,
    damage_the_parts,
    damage_the_parts,
    change_the_head,
    say_other_numbers,
    lambda frame, chance: with_part(frame, 1, np.array([chance.choice([-1, STEPS, 2**62])]).tobytes()),
    say_something_else,
    # done with what never was
    lambda frame, chance: wired(pack_note(FrameKind.CREDIT, chance.choice([2**20, 2**63, 2**64 - 1]))),
]


def attack(room: Room, count: int, mutated: Callable[[Parts, random.Random], Parts]) -> None:
    """Send such frames from a peer, and where it is dropped, from the next one."""
    chance, peers, peer, lease = random.Random(1), 0, b"", StepLease(0, 0, 0, 0)
    for _ in range(count):
        if peer not in room.reception.senders:
            peers += 1
            peer = b"evil %d" % peers
            room.enter(peer)
            (lease, *_) = room.leases(peer)
        good = list(room.good_frames(lease))[chance.randrange(lease.stop - lease.start)]
        bad = mutated(good, chance)
        if bad != good:
            room.hear(peer, bad)
    assert peers >= room.stats.rejected // MAX_BAD_FRAMES
    room.reception._forget(peer)


def several(frame: Parts, chance: random.Random) -> Parts:
    for mutate in chance.choices(MUTATIONS, k=chance.randrange(1, 4)):
        with suppress(FrameDamaged, LookupError, ValueError, TypeError, struct.error, AttributeError):
            frame = mutate(frame, chance)  # while the frame still has what is changed
    return frame


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.torture)])
def test_no_frame_of_many_mutations_is_delivered_or_does_harm(count: int) -> None:
    room = Room()
    attack(room, count, several)
    room.finish()


# Single faults


FACTS = [{}, {"dataset": 1}, {"dataset": "d", "\n": ""}]
TERMS_OF_OTHERS = [{"steps": -2}, {"steps": -1}, *({"facts": facts} for facts in FACTS), {"more": 1}]
BAD_TERMS = ["[]", "{", "[" * 15_000, *(json.dumps(asdict(TERMS) | other) for other in TERMS_OF_OTHERS)]
NOTES = [{}, *({"name": x} for x in ("", "\n", "x" * 300)), {"wants": 0}, *({"terms": x} for x in BAD_TERMS)]


@pytest.mark.parametrize("notes", [*NOTES, []], ids=str)
def test_a_hello_that_is_not_valid_is_rejected(notes: Any) -> None:
    given = read_head(*wired(hello().pack())).description | notes if notes else notes
    room = Room()
    room.hear(b"peer", [crafted(*pack_note(FrameKind.HELLO, VERSION), description=given)])

    assert (room.stats.rejected, room.stats.senders) == (1, ())


def test_a_refusal_is_short_however_much_differs_and_lists_the_names_for_an_unknown_one() -> None:
    room = Room()
    room.reception.expected = {"batch_size": "4"}
    room.enter(b"first")
    ((_, reason),) = room.stats.refused
    assert "batch_size is not given instead of '4'; its names are dataset, seed" in reason
    room.reception.expected = {}
    room.enter(b"one")
    facts = {"dataset": "other"} | {chr(0x4E00 + n): "" for n in range(2240)}
    terms = json.dumps(asdict(replace(TERMS, facts=facts)), ensure_ascii=False, separators=(",", ":"))
    room.hear(b"other", pack_note(FrameKind.HELLO, VERSION, name="o", instance="o", terms=terms, wants=1))

    (*_, (_, reason)) = room.stats.refused
    assert len(reason) == MAX_TEXT_CHARACTERS
    room.hear(b"old", pack_note(FrameKind.HELLO, 1, name="o", instance="o", terms=terms, wants=1))
    assert "uses version 1 of the wire, not 2; install one release" in room.stats.refused[-1][1]
    assert room.said[b"other"][-1].kind is FrameKind.STOP


def test_a_sender_that_reconnects_loses_its_earlier_leases() -> None:
    room = Room()
    room.enter(b"before")
    assert [lease.start for lease in room.leases(b"before")] == [0]
    room.hear(b"after", hello(str(b"before")).pack())

    assert [lease.start for lease in room.leases(b"after")] == [0]
    assert len(room.stats.senders) == 1
    room.hear(b"after", hello(str(b"before")).pack())
    assert (room.stats.rejected, len(room.stats.senders)) == (0, 1), "HELLO may be repeated"


# Over real sockets


@pytest.mark.slow
def test_the_training_loop_goes_on_whatever_a_peer_sends() -> None:
    chance = random.Random(1)
    with RemoteSource(ANY_PORT) as source, serving(lambda: slow_numbers(Path()), source.endpoint), source:
        began = iter(source)
        came = [next(began)]
        terms = source.state_dict()["terms"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.SNDHWM, 0)
            peer.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
            peer.connect(source.endpoint)
            peer.send_multipart(hello(terms=SourceTerms.from_json(terms)).pack())
            heads = []
            while not [head for head in heads if head.kind is FrameKind.LEASE]:
                came.append(next(began))
                while peer.poll(0):
                    heads.append(read_head(peer.recv_multipart()[0]))
            lease = read_lease(next(head for head in heads if head.kind is FrameKind.LEASE))
            session = heads[0].description["session"]
            good = wired(pack_delivery(StepRef(session, lease.id, 0, lease.start), delivery_of(lease.start)))
            peer.send_multipart([b""] * 10_000)
            for _ in range(MAX_BAD_FRAMES - 1):
                peer.send_multipart(flip_a_bit(good, chance))
            came += list(began)
            while (head := read_head(peer.recv_multipart()[0])).kind is not FrameKind.STOP:
                pass
            assert "bad frames" in head.description["text"]
        assert [int(number[0]) for _, number in came] == list(range(30))
        source.receipt().check(30)
        assert source.stats().rejected == MAX_BAD_FRAMES
        assert len(list(source)) == 30
