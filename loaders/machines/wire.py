"""Messages between receivers and their senders; see docs/reference/wire.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.machines.codec import (
    MAX_DESCRIPTION,
    PIECE,
    Buffer,
    FrameDamaged,
    FrameKind,
    Head,
    Memory,
    pack_batch,
    pack_note,
    unpack_batch,
)
from shardprep.loaders.machines.ledger import MAX_LEASE, StepLease, StepRef
from shardprep.loaders.machines.socket import MAX_NAME, MAX_TEXT_CHARACTERS
from shardprep.loaders.order.epoch import LoadedStep

UNKNOWN = -1  # number of steps or records
MAX_PARTS = 1 << 16
VERSION = 2

Facts = dict[str, str]


@dataclass(frozen=True)
class SourceTerms:
    """The terms that determine the batches of a source; equal by value.

    ``facts`` are values by name. The ``steps`` and ``records`` of a pass may be UNKNOWN. If the source
    ``picks``, it makes steps in any order, and their number is known. Step n belongs to part n % ``parts``;
    the steps of a part are made in order.
    """

    facts: Facts
    steps: int
    records: int
    picks: bool
    parts: int = 1

    def __post_init__(self) -> None:
        are_numbers = all(type(n) is int and n >= UNKNOWN for n in (self.steps, self.records))
        are_numbers = are_numbers and type(self.parts) is int and 1 <= self.parts <= MAX_PARTS
        are_texts = isinstance(self.facts, dict) and all(
            isinstance(value, str) and name.isprintable() for name, value in self.facts.items()
        )
        if not (are_numbers and are_texts and self.dataset and type(self.picks) is bool):
            raise UsageError("these are not valid terms of a source")
        if self.picks and self.steps == UNKNOWN:
            raise UsageError("steps can be made in any order only where their number is known")

    @property
    def dataset(self) -> str:
        """The dataset named in receipts."""
        return self.facts.get("dataset") or self.facts.get("identity", "")

    def difference(self, expected: SourceTerms | Facts) -> str:
        """List how these terms differ from the expected ones or facts, as text; "" if they do not."""
        actual = self._all_facts()
        wanted = expected._all_facts() if isinstance(expected, SourceTerms) else expected
        names = wanted if wanted is expected else wanted | actual
        differing = [name for name in names if actual.get(name) != wanted.get(name)]
        found, asked = ({name: repr(facts[name][:100]) for name in facts} for facts in (actual, wanted))
        listed = [
            f"{name} is {found.get(name, 'not given')} instead of {asked.get(name, 'not given')}"
            for name in differing
        ]
        if names is expected and not names.keys() <= actual.keys():
            listed.append(f"its names are {', '.join(actual)}")
        return "; ".join(listed)

    def _all_facts(self) -> Facts:
        numbers = {"steps": self.steps, "records": self.records, "any order": self.picks, "parts": self.parts}
        return self.facts | {name: str(value) for name, value in numbers.items()}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the terms that ``asdict`` made a dict of. Raises UsageError for anything else."""
        if not isinstance(value, Mapping) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError("these are not valid terms of a source")
        return cls(**value)


UNSHARED = SourceTerms({"identity": "send_batches"}, UNKNOWN, UNKNOWN, picks=False)
"""The terms of all senders of which each has its own batches."""


@dataclass(frozen=True)
class Hello:
    """A sender's first message: it takes ``wants`` steps at a time; its connections share an ``instance``."""

    name: str
    instance: str
    terms: SourceTerms
    wants: int

    def __post_init__(self) -> None:
        is_text = isinstance(self.name, str) and self.name.isprintable()  # a line of a log
        if not is_text or not 0 < len(self.name) <= MAX_NAME:
            raise UsageError(f"a sender's name has 1 to {MAX_NAME} printable characters, not {self.name!r}")

    def pack(self) -> list[Buffer]:
        """Return the frame. Raises UsageError if the terms are too long."""
        terms = json.dumps(asdict(self.terms))
        return pack_note(FrameKind.HELLO, VERSION, **(vars(self) | {"terms": terms}))

    @classmethod
    def read(cls, head: Head) -> Self:
        """Parse the frame. Raises FrameDamaged."""
        notes = head.description
        name, instance = (read_text(notes, part, MAX_NAME) for part in ("name", "instance"))
        wants = read_number(notes, "wants", least=1)
        try:
            terms = SourceTerms.from_json(json.loads(read_text(notes, "terms", MAX_DESCRIPTION)))
            return cls(name, instance, terms, wants)
        except (ValueError, RecursionError, UsageError) as error:
            raise FrameDamaged("a HELLO has no name, or no valid terms") from error


def pack_lease(session: int, lease: StepLease) -> list[Buffer]:
    steps = {"pass_number": lease.pass_number, "start": lease.start, "stop": lease.stop}
    return pack_note(FrameKind.LEASE, lease.id, session=session, **steps)


def read_lease(head: Head) -> StepLease:
    """Return the lease in a LEASE frame. Raises FrameDamaged."""
    pass_number, start, stop = (read_number(head.description, n) for n in ("pass_number", "start", "stop"))
    if not start < stop <= start + MAX_LEASE or head.number >= 1 << 63:
        raise FrameDamaged(f"a lease of steps {start} to {stop} is not valid")
    return StepLease(head.number, pass_number, start, stop)


def pack_step(kind: FrameKind, ref: StepRef, **notes: str) -> list[Buffer]:
    """Return an END or ERROR frame, whose number is the step."""
    ids = ref._asdict()
    return pack_note(kind, ids.pop("step"), **ids, **notes)


def read_step(head: Head) -> StepRef:
    """Return the step of an END or ERROR frame. Raises FrameDamaged."""
    session, lease, pass_number = (read_number(head.description, part) for part in StepRef._fields[:-1])
    return StepRef(session, lease, pass_number, head.number)


BATCH_AT = 2  # the buffer of a DATA frame at which the batch begins, unless it has very many records


def pack_delivery(ref: StepRef, step: LoadedStep) -> list[Buffer]:
    """Return a DATA frame. Raises UsageError for a batch that cannot be sent."""
    counts = [len(step.skipped), len(step.left_out), len(step.omitted)]
    meta = np.array([*ref, *counts[: 3 if counts[2] else 2]], np.int64)  # most batches omit nothing
    numbers = np.concatenate([step.delivered, step.skipped, step.left_out, step.omitted])
    return pack_batch((meta, numbers, step.batch), ref.step)


def read_delivery(
    head: Head, parts: Sequence[Any], *, limit_bytes: int, memory: Memory
) -> tuple[StepRef, LoadedStep]:
    """Return a step and its batch, which is copied once into ``memory``. Raises FrameDamaged."""
    match unpack_batch(head, parts, limit_bytes=limit_bytes + BATCH_AT * PIECE, memory=memory):
        case (np.ndarray() as meta, np.ndarray() as numbers, batch) if all(
            array.dtype == np.int64 and array.ndim == 1 for array in (meta, numbers)
        ) and len(meta) - len(StepRef._fields) in (2, 3):
            ids, counts = np.split(meta, [len(StepRef._fields)])
            ref, ends = StepRef(*ids.tolist()), len(numbers) - np.cumsum(counts[::-1])[::-1]
            are_valid = 0 <= counts.min() <= counts.max() <= len(numbers) and ends[0] >= 0
            if ref.step == head.number and are_valid:
                return ref, LoadedStep(ref.step, batch, *np.split(numbers, ends))
    raise FrameDamaged("a DATA frame does not have the form of a delivery")


def read_text(notes: dict[str, Any], name: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """Return a text of the description, with unprintable characters replaced. Raises FrameDamaged."""
    value = notes.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise FrameDamaged(f"a frame's {name} is not a text of at most {most} characters")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in value)


def read_number(notes: dict[str, Any], name: str, *, least: int = 0) -> int:
    """Return a number of the description that is at least ``least``. Raises FrameDamaged."""
    value = notes.get(name)
    if type(value) is not int or not least <= value < 1 << 63:
        raise FrameDamaged(f"a frame's {name} is not a number of at least {least}")
    return value
