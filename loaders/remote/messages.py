"""The messages between a RemoteSource and its senders, as frames. docs/reference/wire.md lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.frames.bounds import FrameDamaged
from shardprep.loaders.frames.codec import (
    Buffer,
    FrameKind,
    Head,
    Memory,
    pack_batch,
    pack_note,
    unpack_batch,
)
from shardprep.loaders.frames.frame_socket import MAX_TEXT_CHARACTERS
from shardprep.loaders.frames.peers import MAX_NAME
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.remote.leasing.ledger import StepLease

from .source_terms import UNKNOWN, SourceTerms

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
    return pack_note(
        FrameKind.LEASE,
        lease.id,
        session=session,
        pass_number=lease.pass_number,
        start=lease.start,
        stop=lease.stop,
    )


def read_lease(head: Head) -> StepLease:
    """Raises FrameDamaged."""
    pass_number, start, stop = (number_in(head.description, n) for n in ("pass_number", "start", "stop"))
    if not start < stop <= start + MAX_LEASE:
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


def _no_records() -> Records:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Delivery:
    """A batch, and the numbers of its records: int64 [n] each.

    ``delivered`` are in the batch, ``skipped`` are bad. ``left_out`` comes with the last step: the records
    that the order leaves out of the pass.
    """

    batch: Any
    delivered: Records
    skipped: Records = field(default_factory=_no_records)
    left_out: Records = field(default_factory=_no_records)

    def is_of(self, records: int) -> bool:
        """Return whether all numbers are below ``records``, which may be UNKNOWN."""
        most = records if records != UNKNOWN else np.iinfo(np.int64).max
        numbers = np.concatenate([self.delivered, self.skipped, self.left_out])
        return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < most)


def pack_delivery(work: StepRef, made: Delivery) -> list[Buffer]:
    """Return a DATA frame. Raises UsageError for a batch that cannot be sent."""
    meta = np.array([*work, len(made.skipped), len(made.left_out)], np.int64)
    numbers = np.concatenate([made.delivered, made.skipped, made.left_out])
    return pack_batch((meta, numbers, made.batch), work.step)


def read_delivery(
    head: Head, parts: Sequence[Any], *, limit_bytes: int, memory: Memory
) -> tuple[StepRef, Delivery]:
    """Return a batch, copied once into ``memory``, and its step. Raises FrameDamaged."""
    match unpack_batch(head, parts, limit_bytes=limit_bytes, memory=memory):
        case (np.ndarray() as meta, np.ndarray() as numbers, batch) if (
            _is_int64(meta) and _is_int64(numbers) and len(meta) == len(StepRef._fields) + 2
        ):
            *named, skipped, left_out = meta.tolist()
            work = StepRef(*named)
            if work.step == head.number and min(skipped, left_out, len(numbers) - skipped - left_out) >= 0:
                ends = len(numbers) - skipped - left_out, len(numbers) - left_out
                return work, Delivery(batch, *np.split(numbers, ends))
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


def _is_int64(array: npt.NDArray[Any]) -> bool:
    return array.dtype == np.int64 and array.ndim == 1
