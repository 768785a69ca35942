"""The receiver of a training process, for the batches that other machines make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import parse_as
from shardprep.formats.runtime.progress import check_flags, check_int, check_seconds
from shardprep.loaders.batches.passes import refuse_sampler
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import DEFAULT_LIMIT
from shardprep.loaders.machines.keys import ReceiverAuth, ReceiverKeys, check_endpoint
from shardprep.loaders.machines.ledger import AHEAD, Ledger, Steps
from shardprep.loaders.machines.reception import Receiver, RemoteStats
from shardprep.loaders.machines.socket import endpoints_of
from shardprep.loaders.order.epoch import LoadedStep
from shardprep.loaders.order.receipt import Receipt, Tally

STATE_VERSION = 1
LEASE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Position:
    """The progress of a pass: all steps before ``step`` were delivered, and the later ones in ``taken``."""

    pass_number: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    receipt: Receipt | None = None


class RemoteSource(Receiver):
    """Iterable over the batches of the Loader or Flow that other machines :func:`.serve` to ``endpoint``.

    Each iteration is one pass, beginning with pass 0. It yields the batches in step order, each exactly once
    and bit for bit, however many senders there are, and whichever of them die, stop or start during the pass.
    Arrays own their memory, aligned to 64 bytes; the arrays of a list share one block. Encoded images become
    bytes, single numbers arrays without axes, named tuples tuples. Without a sender the iteration waits;
    :meth:`stats` shows it, and it is logged once, as is a minute without a batch from those connected. The
    error of a sender that fails is logged, too.

    The first sender determines the batches; a sender with other terms is refused. All frames are checked;
    invalid ones are dropped and counted.

    A context manager. :meth:`close`, and leaving the context without an exception, end the senders; after an
    exception they wait for the next receiver. Closing is idempotent and may be done in any thread; a thread
    that waits for a batch then raises UsageError. One thread at a time may draw. There is one iterator at a
    time: a new one begins the next pass and ends the one before. Neither copyable nor picklable.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` (IPv6 in brackets) or ``ipc://PATH``; port ``*`` chooses a free one,
            which is in the attribute ``endpoint``. Given a list, the source listens at all of them; these are
            in ``endpoints``.
        keys: Keys of this receiver and of the senders it admits; everything is then encrypted. None needs an
            endpoint on loopback, or ``insecure``.
        insecure: Whether to listen on a network without keys.
        ordered: Whether batches come in step order; False delivers them as they arrive, still exactly once.
        limit_bytes: Maximum size of a batch, in bytes or as "256MiB".
        ahead: Number of steps leased to each sender. No step is further from the one due than ``ahead`` times
            the number of senders, so at most that many batches are in memory.
        lease_seconds: Seconds of waiting after which the steps of a silent sender are leased to another one.
        expected: Values that all senders must have, such as ``{"seed": 2, "batch size": 256}``, or the
            ``{"identity": ...}`` given to the senders. It also keeps out senders of an earlier run.

    Raises:
        UsageError: An argument is not valid.
        OperationError: The endpoint or the keys cannot be used.
        SenderFailed: A step cannot be made by three senders, or by all.
    """

    _name = "RemoteSource"
    _superseded = (
        "another iteration of this RemoteSource has begun, or a state was loaded; use two, or end the first"
    )

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        keys: ReceiverKeys | None = None,
        insecure: bool = False,
        ordered: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        ahead: int = AHEAD,
        lease_seconds: float = LEASE_TIMEOUT_S,
        expected: Mapping[str, object] | None = None,
    ) -> None:
        check_flags(ordered=ordered)
        for each in endpoints_of(endpoint):
            check_endpoint(each, keys, insecure=insecure)
        ahead = check_int(ahead, "ahead", least=1)
        if lease_seconds != math.inf:
            check_seconds(lease_seconds, "lease_seconds", above=0)
        if not isinstance(expected, Mapping | None):
            raise UsageError(f"expected must be a dict of names and values, not {expected!r}")
        self._ordered = ordered
        self._auth = ReceiverAuth(keys)
        self._position = Position()  # of the current iteration
        self._next = self._position  # where the next one begins
        self._is_over = False
        super().__init__(
            endpoint,
            Ledger(ahead=ahead, lease_seconds=lease_seconds),
            auth=self._auth,
            limit_bytes=limit_bytes,
            expected={name: str(value) for name, value in (expected or {}).items()},
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass; one that was left early is not continued. Raises UsageError once closed."""
        with self._exclusive.use():
            self._start_at(self._next)
            start = self._position
            self._next = Position(start.pass_number + 1)
            steps = Steps[LoadedStep](start=start.step, total=None, taken=start.taken, ordered=self._ordered)
            self._reception.begin(start.pass_number, steps)
            return self._iterate(self._iteration)

    def _start_at(self, position: Position) -> None:
        self._iteration += 1
        self._position, self._is_over = position, False

    def _iterate(self, iteration: int) -> Iterator[Any]:
        yield from map(self._deliver, self._steps(iteration))  # no Ctrl-C separates a batch from its place
        self._is_over = True

    def _deliver(self, step: LoadedStep) -> Any:
        steps, receipt = self._reception.steps, self.receipt().add(step.delivered).skip(step.skipped)
        if len(step.left_out) or len(step.omitted):
            receipt = receipt.leave_out(step.left_out, omitted=Tally.of(step.omitted))
        position = Position(self._position.pass_number, steps.due, tuple(steps.taken), receipt)
        self._position, self._is_over = position, steps.is_over
        return step.batch

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Return the number of batches of the next iteration. Raises TypeError if it is not known (yet)."""
        refuse_sampler(self)
        return self.batches_per_epoch - self._next.step - len(self._next.taken)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a pass. Raises TypeError if it is not known (yet)."""
        if self._reception.terms is None:
            with suppress(UsageError), self._exclusive.use():
                self._reception.receive()
        terms = self._reception.terms
        if terms is None or terms.steps == wire.UNKNOWN:
            reason = "no sender has connected yet" if terms is None else "the senders do not know it either"
            raise TypeError(f"the length of a pass is not known: {reason}")
        return terms.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON. It grows only with ``ordered=False`` and skipped records.

        Between two batches, it counts the first as delivered: after :meth:`load_state_dict`, also in another
        process and with other senders, the iteration continues with the second.
        """
        position, terms = self._next if self._is_over else self._position, self._reception.terms
        return {
            "version": STATE_VERSION,
            "terms": asdict(terms) if terms else None,
            "pass": position.pass_number,
            "step": position.step,
            "taken": list(position.taken),
            "receipt": position.receipt.to_json() if position.receipt else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """End the current iteration; the next one continues where ``state`` was taken.

        From then on only senders with the terms in the state are admitted. Raises UsageError, and changes
        nothing, if the state is not valid or belongs to other batches.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise UsageError(f"not the state of a RemoteSource, or not of version {STATE_VERSION}")
        try:
            data = {"step": None, "taken": None} | state | {"pass_number": state.get("pass")}
            position, terms = parse_as(Position, data), parse_as(wire.SourceTerms | None, state.get("terms"))
        except (DataError, UnknownVersion, UsageError, TypeError, ValueError) as error:
            raise UsageError(f"not the state of a RemoteSource: {error}") from error
        with self._exclusive.use():
            own_terms = self._reception.terms
            if terms and own_terms and (difference := terms.difference(own_terms)):
                raise UsageError(f"the state does not belong to the batches of these senders: {difference}")
            self._reception.terms = terms or own_terms
            self._start_at(position)
            self._next = position

    def receipt(self) -> Receipt:
        """Return the receipt of the current or last pass, over all senders.

        It counts the delivered records of a Loader, or the steps of a Flow.
        """
        terms = self._reception.terms
        return self._position.receipt or Receipt(terms.dataset if terms else "", self._position.pass_number)

    def reload_keys(self) -> None:
        """Read the folder of allowed keys again; senders with removed keys are refused. Thread-safe.

        Raises UsageError or OperationError, and changes nothing, if the folder cannot be used.
        """
        self._auth.reload()

    def stats(self) -> RemoteStats:
        """Return the connected senders and the counts; ``print`` shows them as text. Thread-safe."""
        return self._reception.stats()

    def close(self) -> None:
        """End the senders and a waiting thread, and free the endpoint. Idempotent."""
        self.__exit__(None)

    def __exit__(self, *exc: object) -> None:
        self._reception.sends_done |= exc[0] is None
        self._exclusive.close()
