"""What the two ends of the wire say to each other, as frames. docs/wire.md is the table of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ...formats.errors import UsageError
from ..frame_peers import MAX_NAME
from ..frames import Buffer, FrameDamaged, Head, Kind, Memory, pack_batch, pack_note, unpack_batch
from ..order import Records
from .ledger import Lease
from .terms import UNKNOWN, Terms

VERSION = 1
MAX_TEXT = 4000  # characters of an error or a reason, so that a header holds them however they are escaped
MAX_TERMS = 16_000  # characters
MAX_SHARE = 1 << 16  # steps of a lease


@dataclass(frozen=True)
class Hello:
    """A sender's greeting: it wants at most ``wants`` steps leased at a time.

    ``instance`` is the same for all connections of one sender.
    """

    name: str
    instance: str
    terms: Terms
    wants: int

    def pack(self) -> list[Buffer]:
        """Raises UsageError where the terms are too long."""
        terms = json.dumps(self.terms.to_json())
        if len(terms) > MAX_TERMS:
            raise UsageError(
                f"what decides the batches takes {len(terms):,} characters, of at most {MAX_TERMS:,}; give a shorter "
                "identity=, a digest of this one, say"
            )
        return pack_note(
            Kind.HELLO, VERSION, name=self.name, instance=self.instance, terms=terms, wants=self.wants
        )

    @classmethod
    def read(cls, head: Head) -> Self:
        """Raises FrameDamaged."""
        notes = head.description
        name, instance = (text_in(notes, part, MAX_NAME) for part in ("name", "instance"))
        wants = number_in(notes, "wants", least=1)
        try:
            terms = Terms.from_json(json.loads(text_in(notes, "terms", MAX_TERMS)))
        except (ValueError, RecursionError, UsageError) as error:
            raise FrameDamaged("a greeting does not say what decides its batches") from error
        if not name:
            raise FrameDamaged("a greeting has no name")
        return cls(name, instance, terms, wants)


class Welcome(NamedTuple):
    """The receiver lets a sender in: ``session`` names the receiver's life, ``limit`` is in bytes of a batch."""

    session: int
    limit: int

    def pack(self) -> list[Buffer]:
        return pack_note(Kind.WELCOME, VERSION, **self._asdict())

    @classmethod
    def read(cls, head: Head) -> Self:
        """Raises FrameDamaged."""
        return cls(*(number_in(head.description, part) for part in cls._fields))


def pack_lease(session: int, lease: Lease) -> list[Buffer]:
    """The receiver wants these steps."""
    return pack_note(
        Kind.LEASE,
        lease.id,
        session=session,
        pass_number=lease.pass_number,
        start=lease.start,
        stop=lease.stop,
    )


def read_lease(head: Head) -> Lease:
    """Raises FrameDamaged."""
    pass_number, start, stop = (number_in(head.description, n) for n in ("pass_number", "start", "stop"))
    if not start < stop <= start + MAX_SHARE:
        raise FrameDamaged(f"a lease of the steps {start} to {stop}")
    return Lease(head.number, pass_number, start, stop)


class Work(NamedTuple):
    """Which step a sender speaks of, under which lease, and to which life of the receiver."""

    session: int
    lease: int
    pass_number: int
    step: int

    @classmethod
    def read(cls, head: Head) -> Self:
        """Of an END or ERROR, whose number is the step. Raises FrameDamaged."""
        session, lease, pass_number = (number_in(head.description, part) for part in cls._fields[:-1])
        return cls(session, lease, pass_number, head.number)

    def pack(self, kind: Kind, **notes: str) -> list[Buffer]:
        """An END or ERROR."""
        named = self._asdict()
        return pack_note(kind, named.pop("step"), **named, **notes)


def _no_records() -> Records:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Delivery:
    """A batch, with the records in it: int64 [n] each. ``skipped`` ones were bad; ``left_out`` are told with the
    last step: what the plan leaves out of its pass."""

    batch: Any
    delivered: Records
    skipped: Records = field(default_factory=_no_records)
    left_out: Records = field(default_factory=_no_records)

    def is_of(self, records: int) -> bool:
        """Whether all numbers are below ``records``, which may be UNKNOWN."""
        most = records if records != UNKNOWN else np.iinfo(np.int64).max
        numbers = np.concatenate([self.delivered, self.skipped, self.left_out])
        return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < most)


def pack_delivery(work: Work, made: Delivery) -> list[Buffer]:
    """A DATA frame. Raises UsageError for a batch that cannot be sent."""
    meta = np.array([*work, len(made.skipped), len(made.left_out)], np.int64)
    numbers = np.concatenate([made.delivered, made.skipped, made.left_out])
    return pack_batch((meta, numbers, made.batch), work.step)


def read_delivery(
    head: Head, parts: Sequence[Any], *, limit_bytes: int, memory: Memory
) -> tuple[Work, Delivery]:
    """Copies the batch into ``memory``, once. Raises FrameDamaged."""
    match unpack_batch(head, parts, limit_bytes=limit_bytes, memory=memory):
        case (np.ndarray() as meta, np.ndarray() as numbers, batch) if (
            _is_int64(meta) and _is_int64(numbers) and len(meta) == len(Work._fields) + 2
        ):
            *named, skipped, left_out = meta.tolist()
            work = Work(*named)
            if work.step == head.number and min(skipped, left_out, len(numbers) - skipped - left_out) >= 0:
                ends = len(numbers) - skipped - left_out, len(numbers) - left_out
                return work, Delivery(batch, *np.split(numbers, ends))
    raise FrameDamaged("a batch does not say what it is")


def text_in(notes: dict[str, Any], name: str, most: int = MAX_TEXT) -> str:
    """Raises FrameDamaged."""
    value = notes.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise FrameDamaged(f"a frame's {name} is no text of at most {most} characters")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in value)


def number_in(notes: dict[str, Any], name: str, *, least: int = 0) -> int:
    """Raises FrameDamaged."""
    value = notes.get(name)
    if type(value) is not int or not least <= value < 1 << 63:
        raise FrameDamaged(f"a frame's {name} is no number from {least} on")
    return value


def _is_int64(array: npt.NDArray[Any]) -> bool:
    return array.dtype == np.int64 and array.ndim == 1
