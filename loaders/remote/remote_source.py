"""A training machine: the batches that data machines make, as if they were made here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self

import zmq

from ...formats.errors import UsageError
from ..frame_socket import FrameSocket
from ..frames import DEFAULT_LIMIT, PIECE
from ..receipt import Receipt
from ..sizes import byte_count
from ..turns import Turns
from .conversation import Delivery
from .endpoints import check_endpoint
from .gate import Gate
from .ledger import AHEAD
from .place import Place, place_from_json
from .reception import Reception
from .remote_stats import RemoteStats
from .security import ReceiverKeys
from .steps import Steps
from .terms import UNKNOWN

OF_ENCRYPTION = 64  # bytes at most that CURVE adds to a buffer: it has 33
SPARE_MESSAGES = 16  # beside batches, that a sender has in flight: so its connection is always read
LEASE_SECONDS = 60.0


class RemoteSource:
    """The batches of the Loader or Flow that data machines :func:`.serve`, from ``endpoint`` (``tcp://ADDRESS:PORT``).

    Each iteration is one pass, pass 0 first: batches in the order of the steps, each exactly once, bit for bit what
    the Loader or Flow yields there, however many senders there are, and whichever of them are killed, stopped or
    started meanwhile; arrays in memory of their own that starts on 64 bytes, lists of arrays as tuples, and
    encoded images as bytes. The first sender decides what is delivered; any that has something else is refused. What is
    in ``expected`` (``{"seed": 2, "batch size": 256}``, or the ``{"identity": ...}`` that senders are given) all must
    have, the first too, which may be left over from another run. While there is no sender, the iteration waits, and
    says so in :meth:`stats` and, once, in the log. With ``ordered=False`` batches come as they arrive, still exactly
    once.

    Each sender has at most ``ahead`` steps to make, and nothing is made that is further ahead of what is due than
    all senders' together, so that no more batches than that lie in memory, each of at most ``limit_bytes`` (or
    ``"256MiB"``). What a sender does not begin to send within ``lease_seconds`` of waiting is asked of another one.

    With ``keys`` only senders with allowed keys are let in, and everything is encrypted; without, the endpoint must be
    on loopback, or ``insecure``. Port ``*`` chooses a free one, which ``endpoint`` tells. Whatever peers send is
    checked, and dropped and counted where it is wrong. SenderFailed is raised where the work itself fails: the senders
    that there are, or three of them, could not make a step.

    A context manager. :meth:`close`, and leaving it without an exception, tell the senders that it is over; where it
    ends otherwise they wait for the next receiver. Both are safe twice and from any thread, and wake who waits with
    UsageError. One thread at a time may draw, and one iterator at a time: the next one begins the next pass, and ends
    the one before. Not picklable.
    """

    batches_never_change = True

    def __init__(
        self,
        endpoint: str,
        *,
        keys: ReceiverKeys | None = None,
        insecure: bool = False,
        ordered: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        ahead: int = AHEAD,
        lease_seconds: float = LEASE_SECONDS,
        expected: Mapping[str, object] | None = None,
    ) -> None:
        check_endpoint(endpoint, keys, insecure=insecure)
        if ahead < 1 or not lease_seconds > 0:
            raise UsageError(
                f"ahead={ahead}, lease_seconds={lease_seconds}: at least 1 step, and more than 0 s"
            )
        limit = byte_count(limit_bytes, of="limit_bytes") if isinstance(limit_bytes, str) else limit_bytes
        gate = Gate(keys)
        options: dict[int, int] = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.RCVHWM: ahead + SPARE_MESSAGES,
            zmq.MAXMSGSIZE: PIECE + OF_ENCRYPTION,
        }
        socket = FrameSocket(
            zmq.ROUTER, endpoint, bind=True, options=options, watched=Gate.WATCHED, security=gate
        )
        self.endpoint = socket.endpoint
        self._ordered = ordered
        self._gate = gate
        self._reception = Reception(
            socket,
            gate,
            ahead=ahead,
            lease_seconds=lease_seconds,
            limit=int(limit),
            expected={name: str(value) for name, value in (expected or {}).items()},
        )
        self._turns = Turns("RemoteSource", self._reception.close)
        self._ticket = 0
        self._next = self._place = Place()  # where the next iteration begins, and what this one has delivered
        self._is_over = False
        Finalize(self, self._turns.close, exitpriority=20)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass; one that was left early is not gone on with. Raises UsageError once this is closed."""
        with self._turns.turn():
            self._begin(self._next)
            self._next = Place(self._place.pass_number + 1)
            steps = Steps[Delivery](
                start=self._place.step, total=None, taken=self._place.taken, ordered=self._ordered
            )
            self._reception.begin(self._place.pass_number, steps)
            return self._pass(self._ticket)

    def _begin(self, place: Place) -> None:
        self._ticket += 1
        self._place, self._is_over = place, False

    def _pass(self, ticket: int) -> Iterator[Any]:
        while batch := self._draw(ticket):
            yield batch.pop()

    def _draw(self, ticket: int) -> list[Any]:
        """The next batch in a list, which is empty at the end of the pass."""
        with self._turns.turn():
            while True:
                self._turns.check_open()
                self._check_current(ticket)
                if made := self._reception.take():
                    self._note(made[0])
                    return [made.pop().batch]
                if self._reception.steps.is_over:
                    self._end()
                    return []
                self._reception.wait(self._turns.woken)

    def _check_current(self, ticket: int) -> None:
        if ticket != self._ticket:
            raise UsageError(
                "another iteration of this RemoteSource has begun, or a state was loaded; use two, or end the first"
            )

    def _note(self, made: Delivery) -> None:
        steps, terms = self._reception.steps, self._reception.senders.terms
        self._place = self._place.after(made, steps.due, steps.taken, terms.dataset if terms else "")
        self._is_over = steps.is_over

    def _end(self) -> None:
        terms = self._reception.senders.terms
        if terms and terms.steps == 0:
            self._place = self._place.empty(terms)
        self._is_over = True

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """How many batches the next iteration yields. TypeError where that is not known, or not yet."""
        return self.batches_per_epoch - self._next.step - len(self._next.taken)

    @property
    def batches_per_epoch(self) -> int:
        """How many batches a whole pass has. TypeError where that is not known: before a first sender came, say."""
        if self._reception.senders.terms is None:
            with suppress(UsageError), self._turns.turn():
                self._reception.hear()
        terms = self._reception.senders.terms
        if terms is None or terms.steps == UNKNOWN:
            reason = "no sender has told it yet" if terms is None else "the senders do not know it either"
            raise TypeError(f"the length of a pass is not known: {reason}")
        return terms.steps

    def state_dict(self) -> dict[str, Any]:
        """Where this is: plain JSON of one size, but for ``ordered=False`` and skipped records.

        Taken between two batches it says that the first of them was delivered; :meth:`load_state_dict` goes on with
        the second, in another process and with other senders.
        """
        place = self._next if self._is_over else self._place
        return place.to_json(self._reception.senders.terms)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was taken; an iteration under way ends.

        From then on only senders of what the state is of are let in. Raises UsageError, and changes nothing.
        """
        place, terms = place_from_json(state)
        with self._turns.turn():
            known = self._reception.senders.terms
            if terms and known and (difference := terms.difference(known)):
                raise UsageError(f"the state is of other batches than the senders make: {difference}")
            self._reception.senders.terms = terms or known
            self._begin(place)
            self._next = place

    def receipt(self) -> Receipt:
        """What was delivered of the pass under way, or of the last one, from whatever senders.

        Over a Loader's senders it counts records, of ``loader.dataset``; over a Flow's it counts steps.
        """
        terms = self._reception.senders.terms
        return self._place.receipt or Receipt(terms.dataset if terms else "", self._place.pass_number)

    def reload_keys(self) -> None:
        """Read the folder of allowed keys again; whose key is no longer there is not heard any more. Thread-safe.

        Raises UsageError and OperationError where it cannot be used, and changes nothing.
        """
        self._gate.reload()

    def stats(self) -> RemoteStats:
        """Who is connected, and what came; ``print`` it. Thread-safe."""
        return self._reception.stats()

    def close(self) -> None:
        """Tell the senders that it is over, wake who waits, and free the endpoint. Idempotent."""
        self._reception.says_done = True
        self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._turns.close()
