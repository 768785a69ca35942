"""Run logs, with a receipt for each rank and epoch, and the proof from them of what a model saw."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import (
    DataError,
    OperationError,
    ShardprepError,
    UnknownVersion,
    UsageError,
    printable,
)
from shardprep.formats.runtime.files import (
    OPEN_FLAGS,
    name_in_data_errors,
    name_in_os_errors,
    read_small_file,
    save_bytes,
)
from shardprep.formats.runtime.json_record import JsonRecord, is_within, parse_fields, sha256_of
from shardprep.formats.runtime.owners import LockDescriptor
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.runtime.user_paths import fingerprint, user_path, user_paths
from shardprep.formats.storage.open import open_records
from shardprep.loaders.loader.replay import RunOrder, Sighting
from shardprep.loaders.loader.run_card import SHARED_SETTINGS, RunCard
from shardprep.loaders.loader.work import location_of
from shardprep.loaders.order.epoch import EpochPlan, parse_ranges, subtract_passed
from shardprep.loaders.order.parts import MAX_RECORDS, Ranges
from shardprep.loaders.order.receipt import Receipt, Tally

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader

SIGNATURE_BYTES = 1024  # more than a signature's line
MAX_KEYS = 20  # in a statement
MAX_EPOCHS = 1 << 16  # searched for records unless more are asked for; a damaged log may name 2**63
_SIGNATURE = b'{"format": "shardprep signature"'  # the beginning of a signature's line


@dataclass(frozen=True)
class LogEntry(JsonRecord):
    """One rank's deliveries of one epoch, or of a part of it.

    Attributes:
        card: The rank's run card.
        receipt: The rank's receipt.
        start: The place in the epoch's order from which its last part continued.
        place: The place that all ranks had reached.
        origin: The place where the receipt began.
        passed: Ranges of places that were skipped.
        since: The place from which batch size and world size were those of the card.
    """

    KIND: ClassVar[str] = "run log"
    ADVICE: ClassVar[str] = "loader.log_epoch(path) writes a log, and a state is loader.state_dict() as JSON"
    MAX_BYTES: ClassVar[int] = 1 << 30  # a line for each rank and epoch

    card: RunCard
    receipt: Receipt
    start: int
    place: int
    origin: int
    passed: Ranges
    since: int = 0

    @property
    def first(self) -> int:
        """The place from which steps are counted: 0 if ``start`` is between two steps of the whole epoch."""
        return self.start if subtract_passed(self.passed, self.start) % self._step_records else 0

    @property
    def last_step(self) -> int | None:
        """The last step delivered, counted from ``first``; None if there was none since ``start``."""
        return self.steps_to(self.place) - 1 if self.place > self.start else None

    def steps_to(self, place: int) -> int:
        """Return the number of steps from ``first`` to a place."""
        places = subtract_passed(self.passed, place) - subtract_passed(self.passed, self.first)
        return -(-places // self._step_records)

    @property
    def _step_records(self) -> int:
        return self.card.batch_size * self.card.world_size

    def plan_for(self, run: EpochPlan) -> EpochPlan:
        """Return the plan of the first rank, and of the steps that this entry counts."""
        own = {name: getattr(self.card, name) for name in ("batch_size", "world_size", "drop_last")}
        return replace(run, rank=0, passed=self.passed, **own)

    @property
    def progress(self) -> tuple[int, ...]:
        """The place, and how many records of the epoch were skipped and left out by then."""
        passed = sum(stop - start for start, stop in self.passed)
        return self.place, passed, self.receipt.left_out.count + self.receipt.omitted.count

    @property
    def identity(self) -> tuple[int, ...]:
        """Epoch, number of ranks, rank and origin: a later entry with these replaces this one."""
        return self.receipt.epoch, self.card.world_size, self.card.rank, self.origin

    def line(self) -> bytes:
        """Return the entry as a line of a log: JSON with a SHA-256 of its rest."""
        values = self.to_json()
        return json.dumps(values | {"sha256": sha256_of(values).removeprefix("sha256:")}).encode() + b"\n"

    def append_to(self, path: str | os.PathLike[str]) -> None:
        """Append the line to a file, creating it if needed, and flush it.

        Ranks that share a file append in turn. A line that does not fit leaves nothing behind. Raises
        OSError, and UsageError for a signed file: nothing may follow its signature.
        """
        file, line = Path(user_path(path)), self.line()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with name_in_os_errors(file), closing(LockDescriptor(os.open(file, flags, 0o666))) as log:
            log.lock()
            size = os.fstat(log.fileno()).st_size
            if _is_signed(log.fileno()):
                raise UsageError("is signed; log to another file", path=file)
            if size and os.pread(log.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # after a line that a power cut left unfinished
            try:
                while line:
                    line = line[os.write(log.fileno(), line) :]
                os.fsync(log.fileno())
            except OSError:
                os.ftruncate(log.fileno(), size)
                raise

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the entry in a line or in a loader's state. Raises DataError, UnknownVersion."""
        is_line = cls.is_format_of(value)
        is_state = isinstance(value, dict) and {"epoch", "place", "receipt"} <= value.keys()
        if not is_line and not is_state:
            raise DataError(f"is neither the log of a run nor a loader's state; {cls.ADVICE}")
        if "card" not in value:
            raise DataError("is a state without a card, from an older release")
        try:
            part = cls(**parse_fields(cls, {"origin": 0, "passed": []} | value))
            parse_ranges(part.passed, MAX_RECORDS)
            if not part.origin <= part.start <= part.place <= MAX_RECORDS:
                raise ValueError(f"its places are {part.origin}, {part.start} and {part.place}")
        except (KeyError, TypeError, ValueError, AttributeError, ShardprepError) as error:
            if isinstance(error, UnknownVersion):
                raise
            raise DataError(f"is neither the log of a run nor a loader's state: {error}") from error
        if not is_line:
            return part
        rest = {name: own for name, own in value.items() if name != "sha256"}  # as its release wrote it
        with suppress(ValueError, RecursionError):  # a NaN, or deep nesting
            if f"sha256:{value.get('sha256')}" == sha256_of(rest) and is_within(rest, part.to_json()):
                return part
        raise DataError("was changed: its SHA-256 does not match")


def _is_signed(log: int) -> bool:
    end = max(0, os.fstat(log).st_size - SIGNATURE_BYTES)
    return _SIGNATURE in os.pread(log, SIGNATURE_BYTES, end)


@dataclass(frozen=True)
class RunLog:
    """The record of a run: its card and the entries of its log or state; a card alone has none.

    ``signer`` has the 32 bytes of the public key that checks the log's signature; None without one.
    """

    card: RunCard
    entries: Sequence[LogEntry] = ()
    signer: bytes | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a log, a loader's state as JSON, or a card, and check the signature of a signed log.

        Raises DataError, MissingExtra for a signature without the package that checks it, OSError.
        """
        file = Path(user_path(path))
        with name_in_os_errors(file), closing(LockDescriptor(os.open(file, OPEN_FLAGS))) as log:
            with suppress(OperationError):  # a file system without locks
                log.lock(shared=True)  # a rank may be appending a line
            data = read_small_file(file, LogEntry.MAX_BYTES)
        with suppress(ValueError, RecursionError):
            value = json.loads(data)
            with name_in_data_errors(file):
                if RunCard.is_format_of(value):
                    return cls(RunCard.from_json(value))
                if isinstance(value, dict) and not LogEntry.is_format_of(value):
                    entry = LogEntry.from_json(value)
                    return cls(entry.card, [entry])
        signer = None
        if (place := data.rfind(_SIGNATURE)) >= 0:
            from shardprep.loaders.loader.signature import Signature  # an extra

            with name_in_data_errors(file):
                signature = Signature.from_line(data[place:])
                signature.check(data[:place])
            data, signer = data[:place], signature.public
        entries = []
        for number, line in enumerate(data.splitlines(), 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                advice = f"remove it if a power cut left it unfinished; {LogEntry.ADVICE}"
                raise DataError(f"line {number} is not JSON; {advice}", path=file) from error
            with name_in_data_errors(file, f"line {number} "):
                entries.append(LogEntry.from_json(value))
        if not entries:
            raise DataError(f"is empty; {LogEntry.ADVICE}", path=file)
        return cls(_listing_card(entries), entries, signer)

    @classmethod
    def merge(cls, paths: Sequence[Path], logs: Sequence[RunLog]) -> Self:
        """Merge logs, given with their paths, into one with the entries that count.

        Within a file, a later line replaces earlier ones of the same epoch, rank and origin, as when a run
        goes back. Among files, the entry that got furthest counts. Raises DataError if two files contradict
        each other about the same place, since they are not from one run.
        """
        merged: dict[tuple[int, ...], LogEntry] = {}
        for path, log in zip(paths, logs, strict=True):
            for identity, entry in {entry.identity: entry for entry in log.entries}.items():
                previous = merged.setdefault(identity, entry)
                merged[identity] = max(previous, entry, key=lambda each: each.progress)
                before, now = previous.receipt, entry.receipt
                is_same = (before.skipped, before.delivered) == (now.skipped, now.delivered)
                if previous.place == entry.place and not is_same:
                    raise DataError(
                        f"differs from another log about rank {entry.card.rank} in epoch {entry.receipt.epoch}; give "
                        "the logs of one run only and, if it went back, only those with which it continued",
                        path=path,
                    )
        entries = [merged[identity] for identity in sorted(merged)]
        return cls(_listing_card(entries), entries)

    def card_of(self, entry: LogEntry | None) -> RunCard:
        """Return an entry's card, with the chosen records that another one may list; ``card`` for None."""
        own, bare = entry.card if entry else self.card, self.card.without_numbers()
        same = [name for name in ("records", "without") if getattr(own, name) == getattr(bare, name)]
        return replace(own, **{name: getattr(self.card, name) for name in same})

    def save(self, path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> None:
        """Write the entries to a file, replacing an existing one; sign it if ``key`` names a secret key file.

        Raises MissingExtra, UsageError for an unusable key, OperationError, OSError.
        """
        data = b"".join(entry.line() for entry in self.entries)
        if key is not None:
            from shardprep.loaders.loader.signature import Signature  # an extra

            data += Signature.of(data, key).line()
        save_bytes(user_path(path).absolute(), data)

    def last_entry(self, epoch: int | None = None, first: int | None = None) -> LogEntry | None:
        """Return the first rank's last entry of an epoch, or of all, if possible with this ``first``."""
        entries = [entry for entry in self.entries if epoch in (None, entry.receipt.epoch)]
        exact = [entry for entry in entries if first in (None, entry.first)]
        return min(reversed(exact or entries), key=lambda entry: entry.card.rank, default=None)

    def count_epochs(self) -> int:
        """Return the number of epochs, to the last entry's. Raises DataError if it is above MAX_EPOCHS."""
        last = max((entry.receipt.epoch for entry in self.entries), default=0)
        if last >= MAX_EPOCHS:
            raise DataError(f"the log has epoch {last:,}; say by --epochs how many of them to search")
        return last + 1

    def sightings(self, order: RunOrder, numbers: Iterable[int], epochs: int) -> Iterator[Sighting]:
        """Yield the deliveries of these records to any rank in so many epochs.

        ``order`` is that of ``card``. In an epoch without an entry, all its steps count.
        """
        wanted = set(numbers)
        for epoch in range(epochs):
            entries = [entry for entry in self.entries if entry.receipt.epoch == epoch]
            parts = {  # those that had different steps, each to its furthest entry
                (entry.since, entry.first, entry.card.world_size, entry.card.batch_size): entry
                for entry in sorted(entries, key=lambda entry: entry.place)
            }
            reached = 0
            for part in sorted(parts.values(), key=lambda entry: (entry.origin, entry.place, entry.start)):
                own = order._replace(plan=part.plan_for(order.plan), passed={epoch: part.passed})
                begin = max(reached, part.first, part.since)
                unlogged = own.numbers_between(reached, begin, epoch)
                yield from (Sighting(n, epoch, None, None) for n in unlogged.tolist() if n in wanted)
                steps = range(part.steps_to(begin), part.steps_to(part.place))
                yield from own.sightings(wanted, epoch, part.first, steps)
                reached = max(begin, part.place)
            yield from () if parts else order.sightings(wanted, epoch)

    @property
    def passed(self) -> dict[int, Ranges]:
        """The ranges of places that were skipped, by epoch."""
        return {entry.receipt.epoch: entry.passed for entry in self.entries if entry.passed}


@dataclass(frozen=True)
class EpochProof:
    """All ranks' deliveries of an epoch: counts of records, and the keys of skipped bad ones.

    ``skipped_places`` are ranges of the epoch's order, [start, stop), that were left out.
    """

    epoch: int
    delivered: int
    left_out: int
    omitted: int
    bad: tuple[str, ...]
    skipped_places: Ranges


@dataclass(frozen=True)
class RunProof:
    """A proof that a run's deliveries followed its order.

    Attributes:
        root: Root of the dataset.
        records: The number of records in an epoch's order, of the dataset or the subset.
        epochs: The epochs, in order.
        without: Keys of the records that ``without=`` omitted.
        transforms: All different transforms, in words.
        statement: What is proven, in words.
        signers: Fingerprints of the keys that signed the logs, if all are signed.
    """

    root: str
    records: int
    epochs: tuple[EpochProof, ...]
    without: tuple[str, ...]
    transforms: tuple[str, ...]
    statement: str
    signers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the proof as a JSON object."""
        return asdict(self)


def prove(
    dataset: str | os.PathLike[str],
    logs: Sequence[str | os.PathLike[str]],
    *,
    records: npt.ArrayLike | None = None,
    without: npt.ArrayLike | None = None,
    signed_by: str | os.PathLike[str] | None = None,
    save: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> RunProof:
    """Prove what a run delivered, from the logs of all ranks and the dataset.

    Recomputes the order of each epoch from the dataset and the cards, and proves that the ranks together got
    each of its records exactly once, except records dropped by ``drop_last``, omitted on purpose or skipped
    as bad, and that the records left out match the run's options.

    Args:
        dataset: The dataset's folder.
        logs: Files written by :meth:`.Loader.log_epoch`, of all ranks and restarts. States as JSON cover the
            deliveries before the number of ranks changed. Signatures in logs are checked.
        records: The subset of the run, needed if it has more records than a log lists (4,096).
        without: The records that the run omitted, likewise.
        signed_by: The file of a public key; each log must be signed by it.
        save: A file to which the proven entries are written, as one log.
        key: The file of a secret key that signs the saved log.

    Raises:
        DataError: A log is damaged or changed, is of another dataset, does not account for each record, or is
            not signed by that key.
        UsageError: No log is given; the run's subset or omitted records are neither listed nor given, or
            others are given; or a key is unusable.
        MissingExtra: A log is signed or to be signed, and ``cryptography`` is not installed.
        ShardprepError, OSError: The dataset cannot be opened, or the log cannot be saved.
    """
    from shardprep.loaders.loader.loader import Loader

    if key is not None and save is None:
        raise UsageError("key= signs the saved log; give save=FILE, too")
    places = user_paths(logs, "logs")
    read = [RunLog.load(place) for place in places]
    if not read:
        raise UsageError("there is no log to prove a run from; give at least one")
    for place, log in zip(places, read, strict=True):
        if not log.entries:
            raise DataError(
                f"is neither the log of a run nor a loader's state; {LogEntry.ADVICE}", path=place
            )
    signers = _signers(places, read, signed_by)
    if save is not None:
        final, folder = Path(user_path(save)).resolve(), Path(user_path(dataset)).resolve()
        keys = [Path(user_path(file)).resolve() for file in (key, signed_by) if file is not None]
        if final in keys or final.is_relative_to(folder):
            raise UsageError(
                "is a key, or in the dataset's folder; save the log under another name", path=save
            )
        if key is None and final.is_file():
            with final.open("rb") as file:
                if _is_signed(file.fileno()):
                    raise UsageError("is signed; save the log under another name, or give a key", path=save)
    merged = RunLog.merge(places, read)
    parts = merged.entries
    card = merged.card
    bare = card.without_numbers()
    for own in (part.card.without_numbers() for part in parts):
        for name in SHARED_SETTINGS:
            if (value := getattr(bare, name)) != (own_value := getattr(own, name)):
                raise DataError(
                    f"the logs are of runs that differ in {name}, {value} and {own_value}; prove each run by itself"
                )
    chosen = {"records": records, "without": without}
    given: dict[str, Any] = {name: numbers for name, numbers in chosen.items() if numbers is not None}
    plain = replace(card, rank=0, transform=None, columns=None, on_bad_record="raise")
    with open_records(location_of(dataset)) as opened:
        if opened.root != card.dataset:
            raise DataError(f"the run used the dataset with the root {card.dataset}", path=opened.location)
    with Loader(dataset, workers=0, **plain.options(**given)) as loader:
        own, known = (each.without_numbers() for each in (loader.card(), card))
        if differing := [name for name in given if getattr(own, name) != getattr(known, name)]:
            raise UsageError(f"{' and '.join(differing)} must be those of the run")
        numbers = sorted({part.receipt.epoch for part in parts})
        epochs = [_epoch_proof([p for p in parts if p.receipt.epoch == n], n, loader) for n in numbers]
        left_out = tuple(loader.key(number) for number in loader._subset.omitted.tolist())
        titles = {
            json.dumps(card and [card.name, card.arguments], sort_keys=True): card.title if card else "none"
            for card in (part.card.transform for part in parts)
        }
        total = sum(loader._plan.shard_counts)
        subject = count_of(total, "place" if card.weights else "record")
        if card.records is not None:
            subject = f"{total:,} of {len(loader.dataset):,} records, a subset,"
    transforms = tuple(sorted(titles.values()))
    statement = _statement(f"{subject} of {card.dataset}", epochs, left_out, transforms, signers)
    if save is not None:
        merged.save(save, key=key)
    return RunProof(card.dataset, total, tuple(epochs), left_out, transforms, statement, signers)


def _signers(
    paths: Sequence[Path], logs: Sequence[RunLog], signed_by: str | os.PathLike[str] | None
) -> tuple[str, ...]:
    """Return the fingerprints of the keys that signed the logs; none if one is not signed and need not be."""
    if signed_by is None and any(log.signer is None for log in logs):
        return ()
    from shardprep.loaders.loader.signature import load_public_key  # an extra

    signer = None if signed_by is None else load_public_key(signed_by)
    signers = set()
    for path, log in zip(paths, logs, strict=True):
        if log.signer is None:
            raise DataError("is not signed", path=path)
        if signer not in (None, log.signer):
            actual, expected = fingerprint(log.signer), fingerprint(signer)
            raise DataError(f"is signed by another key: {actual}, not {expected}", path=path)
        signers.add(fingerprint(log.signer))
    return tuple(sorted(signers))


def _listing_card(entries: Sequence[LogEntry]) -> RunCard:
    """Return the last card, if possible one that lists the chosen records, as a state's does not."""
    cards = [entry.card for entry in reversed(entries)]
    listing = (c for c in cards if all(r is None or r.numbers is not None for r in (c.records, c.without)))
    return next(listing, cards[0])


def _epoch_proof(parts: Sequence[LogEntry], number: int, loader: Loader) -> EpochProof:
    """Check the receipts of an epoch against its order. Raises DataError.

    A receipt continues over restarts of the same ranks, so a rank's largest one counts. One that began later,
    after a change in the number of ranks, adds to it. The sums tell which applies.
    """
    by_place = sorted(parts, key=lambda part: (part.place, -part.origin))
    furthest = {(part.card.rank, part.card.world_size): part for part in by_place}
    try:
        return _check_epoch(list(furthest.values()), number, loader)
    except DataError:
        with suppress(DataError):
            return _check_epoch(parts, number, loader)
        raise


def _check_epoch(parts: Sequence[LogEntry], number: int, loader: Loader) -> EpochProof:
    last = max(parts, key=lambda part: (part.place, part.start, part.progress))
    passed = max(parts, key=lambda part: part.progress[1]).passed
    plan = replace(last.plan_for(loader._plan), passed=passed)
    merged = Receipt.merge(part.receipt for part in parts)
    stop = plan.split(subtract_passed(passed, last.start)).whole.stop
    left_out = Tally.of(plan.drop_omitted(plan.order(number)[stop:], number))
    omitted = plan.omitted_tally(number)
    counts = {"left_out": left_out.count, "omitted": omitted.count, "skipped": len(merged.skipped)}
    merged.check(sum(plan.shard_counts), **counts)
    if (merged.left_out, merged.omitted) != (left_out, omitted):
        raise DataError(f"epoch {number}: the receipts left out different records than the run's options")
    numbers = loader._subset.numbers_at(np.array(merged.skipped, np.int64), number)
    bad = tuple(loader.key(record) for record in numbers.tolist())
    return EpochProof(number, merged.count, left_out.count, omitted.count, bad, passed)


def _statement(
    subject: str,
    epochs: Sequence[EpochProof],
    without: Sequence[str],
    transforms: Sequence[str],
    signers: Sequence[str],
) -> str:
    runs = groupby(enumerate(each.epoch for each in epochs), lambda each: each[1] - each[0])
    spans = [[epoch for _, epoch in run] for _, run in runs]  # of consecutive epochs
    numbers = ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)
    which = "epoch" if len(epochs) == 1 else "each of the epochs"
    sentences = [f"Each of {subject} is accounted for, exactly once, in {which} {numbers}"]
    if len(transforms) > 1:
        names = ", ".join(map(printable, transforms))
        sentences.append(f"made with {len(transforms)} different transforms: {names}")
    if without:
        sentences.append(f"left out on purpose: {count_of(len(without), 'record')}, {_list_keys(without)}")
    for epoch in epochs:
        places = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in epoch.skipped_places)
        reasons = [
            f"{count_of(epoch.left_out, 'record')} after the last full batch" if epoch.left_out else "",
            f"places {places} skipped on purpose" if places else "",
            f"{count_of(len(epoch.bad), 'bad record')} skipped, {_list_keys(epoch.bad)}" if epoch.bad else "",
        ]
        if reasons := list(filter(None, reasons)):
            sentences.append(f"not delivered in epoch {epoch.epoch}: {'; '.join(reasons)}")
    if signers:
        sentences.append(f"signed by the key {' and the key '.join(signers)}")
    return "\n".join(f"{sentence}." for sentence in sentences)


def _list_keys(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - MAX_KEYS:,} more" if len(keys) > MAX_KEYS else ""
    return ", ".join(map(printable, keys[:MAX_KEYS])) + more
