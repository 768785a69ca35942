"""Messages and counts of a RemoteSource and its senders; see docs/reference/wire.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.sizes import count_of
from shardprep.loaders.machines.codec import (
    Buffer,
    FrameDamaged,
    FrameKind,
    Head,
    Memory,
    pack_batch,
    pack_note,
    unpack_batch,
)
from shardprep.loaders.machines.ledger import StepLease
from shardprep.loaders.machines.socket import MAX_NAME, MAX_TEXT_CHARACTERS
from shardprep.loaders.order.epoch import LoadedStep
from shardprep.loaders.order.receipt import Receipt, Tally, natural

UNKNOWN = -1  # a number of steps or records
MAX_DIFFERENCES = 16  # in a message
MAX_NAME_CHARACTERS = 40
MAX_PARTS = 1 << 16

Facts = dict[str, str]


@dataclass(frozen=True)
class SourceTerms:
    """``facts`` are the values that determine the batches, by name.

    ``steps`` is the number of steps of a pass, ``records`` that of the records in a whole pass; both may be
    UNKNOWN. Where ``picks`` is true, steps can be made in any order, and their number is known. Where there
    are more ``parts`` than one, step n is of part n % ``parts``, and the steps of a part are made in order.
    Equal by value.
    """

    facts: Facts
    steps: int
    records: int
    picks: bool
    parts: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError where a value is not valid."""
        whole = all(type(n) is int and n >= UNKNOWN for n in (self.steps, self.records))
        whole = whole and type(self.parts) is int and 1 <= self.parts <= MAX_PARTS
        texts = isinstance(self.facts, dict) and all(isinstance(x, str) for x in self.facts.values())
        if not (whole and texts and self.dataset and type(self.picks) is bool):
            raise UsageError("these are not valid terms of a source")
        if self.picks and self.steps == UNKNOWN:
            raise UsageError("steps can be made in any order only where their number is known")

    @property
    def dataset(self) -> str:
        """The dataset that receipts name."""
        return self.facts.get("dataset") or self.facts.get("identity", "")

    def difference(self, expected: SourceTerms) -> str:
        """Return a text that lists how these differ from the expected ones, "" where they are equal."""
        actual, wanted = self._named(), expected._named()
        return _difference(actual, wanted, [*{**wanted, **actual}])

    def missing(self, expected: Facts) -> str:
        """Return a text that lists which of the expected facts differ here, "" where none does."""
        return _difference(self._named(), expected, [*expected])

    def _named(self) -> Facts:
        numbers = {"steps": self.steps, "records": self.records, "any order": self.picks, "parts": self.parts}
        return self.facts | {name: str(value) for name, value in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what ``to_json`` returned. Raises UsageError for anything else."""
        if not isinstance(value, Mapping) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError("these are not valid terms of a source")
        return cls(**value)


def _difference(actual: Facts, expected: Facts, names: Sequence[str]) -> str:
    def short(value: str | None) -> str:
        return "not given" if value is None else repr(value[:100])

    differing = [name for name in names if actual.get(name) != expected.get(name)]
    listed = [
        f"{name[:MAX_NAME_CHARACTERS]} is {short(actual.get(name))} instead of {short(expected.get(name))}"
        for name in differing[:MAX_DIFFERENCES]
    ]
    if len(differing) > MAX_DIFFERENCES:
        listed.append(f"and {len(differing) - MAX_DIFFERENCES} more")
    return "; ".join(listed)


VERSION = 1
MAX_TERMS = 16_000  # characters
MAX_LEASE = 1 << 16  # steps


@dataclass(frozen=True)
class Hello:
    """The first message of a sender, which takes leases of at most ``wants`` steps at a time.

    ``instance`` is the same for all connections of one sender.
    """

    name: str
    instance: str
    terms: SourceTerms
    wants: int

    def pack(self) -> list[Buffer]:
        """Return the frame. Raises UsageError where the terms are too long."""
        terms = json.dumps(self.terms.to_json())
        if len(terms) > MAX_TERMS:
            raise UsageError(
                f"the terms of this source take {len(terms):,} characters, of at most {MAX_TERMS:,}; give a shorter "
                "identity=, for example a digest of this one"
            )
        return pack_note(
            FrameKind.HELLO, VERSION, name=self.name, instance=self.instance, terms=terms, wants=self.wants
        )

    @classmethod
    def read(cls, head: Head) -> Self:
        """Raises FrameDamaged."""
        notes = head.description
        name, instance = (text_in(notes, part, MAX_NAME) for part in ("name", "instance"))
        wants = number_in(notes, "wants", least=1)
        try:
            terms = SourceTerms.from_json(json.loads(text_in(notes, "terms", MAX_TERMS)))
        except (ValueError, RecursionError, UsageError) as error:
            raise FrameDamaged("a HELLO has no valid terms") from error
        if not name:
            raise FrameDamaged("a HELLO has no name")
        return cls(name, instance, terms, wants)


class Welcome(NamedTuple):
    """The admission of a sender. ``session`` identifies the receiver, ``limit`` is in bytes of a batch."""

    session: int
    limit: int

    def pack(self) -> list[Buffer]:
        return pack_note(FrameKind.WELCOME, VERSION, **self._asdict())

    @classmethod
    def read(cls, head: Head) -> Self:
        """Raises FrameDamaged."""
        return cls(*(number_in(head.description, part) for part in cls._fields))


def pack_lease(session: int, lease: StepLease) -> list[Buffer]:
    """Return the LEASE frame of some steps."""
    steps = {"pass_number": lease.pass_number, "start": lease.start, "stop": lease.stop}
    return pack_note(FrameKind.LEASE, lease.id, session=session, **steps)


def read_lease(head: Head) -> StepLease:
    """Raises FrameDamaged."""
    pass_number, start, stop = (number_in(head.description, n) for n in ("pass_number", "start", "stop"))
    if not start < stop <= start + MAX_LEASE or head.number >= 1 << 63:
        raise FrameDamaged(f"a lease of the steps {start} to {stop} is not valid")
    return StepLease(head.number, pass_number, start, stop)


class StepRef(NamedTuple):
    """A step that a sender refers to: the receiver's session, the lease, the pass and the step."""

    session: int
    lease: int
    pass_number: int
    step: int

    @classmethod
    def read(cls, head: Head) -> Self:
        """Read it from an END or ERROR, where ``number`` is the step. Raises FrameDamaged."""
        session, lease, pass_number = (number_in(head.description, part) for part in cls._fields[:-1])
        return cls(session, lease, pass_number, head.number)

    def pack(self, kind: FrameKind, **notes: str) -> list[Buffer]:
        """Return an END or ERROR frame."""
        named = self._asdict()
        return pack_note(kind, named.pop("step"), **named, **notes)


def pack_delivery(work: StepRef, made: LoadedStep) -> list[Buffer]:
    """Return a DATA frame. Raises UsageError for a batch that cannot be sent."""
    counts = [len(made.skipped), len(made.left_out), len(made.omitted)]
    meta = np.array([*work, *counts[: 3 if counts[2] else 2]], np.int64)  # most have none that are omitted
    numbers = np.concatenate([made.delivered, made.skipped, made.left_out, made.omitted])
    return pack_batch((meta, numbers, made.batch), work.step)


def read_delivery(
    head: Head, parts: Sequence[Any], *, limit_bytes: int, memory: Memory
) -> tuple[StepRef, LoadedStep]:
    """Return a step, its batch copied once into ``memory``, and its lease. Raises FrameDamaged."""
    match unpack_batch(head, parts, limit_bytes=limit_bytes, memory=memory):
        case (np.ndarray() as meta, np.ndarray() as numbers, batch) if all(
            array.dtype == np.int64 and array.ndim == 1 for array in (meta, numbers)
        ) and len(meta) - len(StepRef._fields) in (2, 3):
            named, counts = np.split(meta, [len(StepRef._fields)])
            work, ends = StepRef(*named.tolist()), len(numbers) - np.cumsum(counts[::-1])[::-1]
            if (
                work.step == head.number
                and 0 <= counts.min() <= counts.max() <= len(numbers)
                and ends[0] >= 0
            ):
                return work, LoadedStep(work.step, batch, *np.split(numbers, ends))
    raise FrameDamaged("a DATA frame does not have the form of a delivery")


def text_in(notes: dict[str, Any], name: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """Return a text with unprintable characters replaced. Raises FrameDamaged."""
    value = notes.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise FrameDamaged(f"a frame's {name} is not a text of at most {most} characters")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in value)


def number_in(notes: dict[str, Any], name: str, *, least: int = 0) -> int:
    """Return a number of at least ``least``. Raises FrameDamaged."""
    value = notes.get(name)
    if type(value) is not int or not least <= value < 1 << 63:
        raise FrameDamaged(f"a frame's {name} is not a number of at least {least}")
    return value


STATE_VERSION = 1


@dataclass(frozen=True)
class Position:
    """All steps of a pass before ``step`` were delivered; of the later ones, those in ``taken``."""

    pass_number: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    receipt: Receipt | None = None

    def after(self, made: LoadedStep, step: int, taken: Sequence[int], dataset: str) -> Position:
        """Return the position after one more batch. ``dataset`` is that of a new receipt."""
        before = self.receipt or Receipt(dataset, self.pass_number)
        receipt = before.add(made.delivered).skip(made.skipped)
        if len(made.left_out) or len(made.omitted):
            receipt = receipt.leave_out(made.left_out, omitted=Tally.of(made.omitted))
        return Position(self.pass_number, step, tuple(taken), receipt)

    def empty(self, terms: SourceTerms) -> Position:
        """Return the position in a pass without steps, which leaves out all records."""
        receipt = Receipt(terms.dataset, self.pass_number).leave_out(range(max(0, terms.records)))
        return replace(self, receipt=receipt)

    def to_json(self, terms: SourceTerms | None) -> dict[str, Any]:
        """Return what :func:`position_from_json` reads."""
        return {
            "version": STATE_VERSION,
            "terms": terms.to_json() if terms else None,
            "pass": self.pass_number,
            "step": self.step,
            "taken": list(self.taken),
            "receipt": self.receipt.to_json() if self.receipt else None,
        }


def position_from_json(state: object) -> tuple[Position, SourceTerms | None]:
    """Return the position, and the terms where known. Raises UsageError."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a RemoteSource, or not of version {STATE_VERSION}")
    terms, receipt = state.get("terms"), state.get("receipt")
    taken = state.get("taken")
    try:
        return Position(
            natural(state.get("pass")),
            natural(state.get("step")),
            tuple(map(natural, taken if isinstance(taken, list) else [None])),
            None if receipt is None else Receipt.from_json(receipt),
        ), None if terms is None else SourceTerms.from_json(terms)
    except (DataError, UnknownVersion, UsageError, ValueError) as error:
        raise UsageError(f"not the state of a RemoteSource: {error}") from error


WAITING = "waiting for the receiver"
STANDING_BY = "standing by"
SENDING = "sending"
CLOSED = "the receiver was closed"


@dataclass(frozen=True)
class SenderReport:
    """One connected sender.

    ``name`` is the name that the sender gave, ``key`` the name of the key that it has proved to have, ""
    without keys. ``batches`` and ``bytes`` count its deliveries, ``rate`` is in batches per second
    since it joined, and ``lag`` is the number of steps that are leased to it and have not arrived.
    """

    name: str
    key: str
    batches: int
    bytes: int
    rate: float
    lag: int


@dataclass(frozen=True)
class RemoteStats:
    """The counts of a RemoteSource since it was made.

    ``senders`` are those that are connected now. ``refused`` has the names and reasons of the last 100
    senders that were refused, ``not_admitted`` counts peers that did not complete the handshake. ``batches``
    were taken; ``rejected`` counts damaged frames, ``repeated`` batches that had arrived before, and
    ``stale`` frames of a pass that is over or of a peer that was not admitted. ``leases_given_again`` counts
    leases with steps that were leased to another sender. ``waited`` is the time in seconds that the consumer
    waited for batches.
    """

    senders: tuple[SenderReport, ...]
    refused: tuple[tuple[str, str], ...]
    not_admitted: int
    batches: int
    rejected: int
    repeated: int
    stale: int
    leases_given_again: int
    waited: float

    def __repr__(self) -> str:
        return (
            f"<RemoteStats: {self.batches:,} batches, {len(self.senders)} senders connected, "
            f"{len(self.refused)} refused>"
        )

    def __str__(self) -> str:
        """Return some lines, one for each sender."""
        lines = [
            f"{self.batches:,} batches from {count_of(len(self.senders), 'sender')}; waited {self.waited:.1f} s for them; "
            f"{self.repeated} repeated, {self.stale} stale, {self.rejected} rejected, "
            f"{self.leases_given_again} leases given again, {self.not_admitted} not admitted"
        ]
        lines += [f"  {s.name}: {s.batches:,} batches, {s.rate:.1f}/s, lag {s.lag}" for s in self.senders]
        lines += [f"  refused {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines if self.senders else [*lines, "  no sender is connected"])


@dataclass(frozen=True)
class SenderStats:
    """The counts of a sender since :func:`.serve` was called.

    ``state`` is a text: "waiting for the receiver", "standing by", "sending" or "the receiver was closed".
    ``batches`` and ``bytes`` were sent. ``lag`` is the number of steps that are leased to this sender and not
    yet sent, ``connections`` how often a receiver has admitted it, and ``seconds`` the time since the call.
    """

    state: str = WAITING
    batches: int = 0
    bytes: int = 0
    lag: int = 0
    connections: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "bytes": self.bytes,
            "connections": self.connections,
            "seconds": round(self.seconds, 3),
        }
