"""The batches that other machines make, for a training process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self

import zmq

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.sizes import byte_count
from shardprep.loaders.batching.keras_hint import KerasHint
from shardprep.loaders.frames.codec import DEFAULT_LIMIT, PIECE
from shardprep.loaders.frames.exclusive_use import ExclusiveUse
from shardprep.loaders.frames.frame_socket import SPARE_MESSAGES, FrameSocket
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.remote.auth.endpoints import check_endpoint
from shardprep.loaders.remote.auth.keys import ReceiverKeys
from shardprep.loaders.remote.auth.receiver_auth import ReceiverAuth
from shardprep.loaders.remote.leasing.ledger import AHEAD
from shardprep.loaders.remote.leasing.step_tracker import Steps

from .messages import Delivery
from .position import Position, position_from_json
from .receiver import Reception
from .source_terms import UNKNOWN
from .stats import RemoteStats

MAX_ENCRYPTION_OVERHEAD = 64  # bytes of a buffer; CURVE adds 33
LEASE_TIMEOUT_S = 60.0


class RemoteSource(KerasHint, Owned):
    """The batches of the Loader or Flow that other machines :func:`.serve` to ``endpoint``.

    Each iteration is one pass, beginning with pass 0. It yields the batches of the Loader or Flow in the
    order of the steps, each exactly once and bit for bit, however many senders there are, and whichever of
    them die, stop or start during the pass. Arrays own their memory, aligned to 64 bytes; those of a list lie
    in one piece. Encoded images become bytes. Without a sender the iteration waits; :meth:`stats` shows it,
    and the log has it once. With ``ordered=False`` batches come as they arrive, still exactly once.

    The first sender determines the batches; a sender with other terms is refused. All senders, the first
    included, must have the values in ``expected``: ``{"seed": 2, "batch size": 256}``, for example, or the
    ``{"identity": ...}`` given to the senders. So a sender that is left from an earlier run is refused, too.

    ``endpoint`` is ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; port ``*`` chooses a free one, which is in the
    attribute ``endpoint``. With ``keys`` only senders with allowed keys are admitted, and everything is
    encrypted. Without, the endpoint must be on loopback, or ``insecure`` be true. Everything that peers send
    is checked; what is not valid is dropped and counted.

    At most ``ahead`` steps are leased to each sender, and no step further from the one due than ``ahead``
    times the number of senders. So at most that many batches lie in memory, each of at most ``limit_bytes``
    (a number, or a text such as ``"256MiB"``). Steps of a sender that sends nothing for ``lease_seconds`` of
    waiting are leased to another one. SenderFailed is raised where a step cannot be made by three senders, or
    by all.

    A context manager. :meth:`close`, and leaving the context without an exception, end the senders; after an
    exception they wait for the next receiver. Closing is idempotent, may be done in any thread, and a thread
    that waits for a batch then raises UsageError. One thread at a time may draw, and there is one iterator at
    a time: the next one begins the next pass and ends the one before. Neither copyable nor picklable. Raises
    UsageError for arguments that are not valid, OperationError where the endpoint or the keys cannot be used.
    """

    instead = "an endpoint has one receiver: make it where it is needed"

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
        lease_seconds: float = LEASE_TIMEOUT_S,
        expected: Mapping[str, object] | None = None,
    ) -> None:
        check_endpoint(endpoint, keys, insecure=insecure)
        if ahead < 1 or not lease_seconds > 0:
            raise UsageError(
                f"ahead={ahead}, lease_seconds={lease_seconds}: at least 1 step, and more than 0 s"
            )
        limit = byte_count(limit_bytes, of="limit_bytes") if isinstance(limit_bytes, str) else limit_bytes
        auth = ReceiverAuth(keys)
        options: dict[int, int] = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.RCVHWM: ahead + SPARE_MESSAGES,
            zmq.MAXMSGSIZE: PIECE + MAX_ENCRYPTION_OVERHEAD,
        }
        socket = FrameSocket(
            zmq.ROUTER, endpoint, bind=True, options=options, watched=ReceiverAuth.WATCHED, security=auth
        )
        self.endpoint = socket.endpoint
        self._ordered = ordered
        self._auth = auth
        self._reception = Reception(
            socket,
            auth,
            ahead=ahead,
            lease_seconds=lease_seconds,
            limit=int(limit),
            expected={name: str(value) for name, value in (expected or {}).items()},
        )
        self._exclusive = ExclusiveUse("RemoteSource", self._reception.close)
        self._iteration = 0  # the number of the current one
        self._position = Position()  # of the current iteration
        self._next = self._position  # where the next one begins
        self._is_over = False
        Finalize(self, self._exclusive.close, exitpriority=20)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass; one that was left early is not continued. Raises UsageError once closed."""
        with self._exclusive.use():
            self._begin(self._next)
            position = self._position
            self._next = Position(position.pass_number + 1)
            steps = Steps[Delivery](
                start=position.step, total=None, taken=position.taken, ordered=self._ordered
            )
            self._reception.begin(position.pass_number, steps)
            return self._pass(self._iteration)

    def _begin(self, position: Position) -> None:
        self._iteration += 1
        self._position, self._is_over = position, False

    def _pass(self, iteration: int) -> Iterator[Any]:
        while batch := self._draw(iteration):
            yield batch.pop()

    def _draw(self, iteration: int) -> list[Any]:
        """Return the next batch in a list, which is empty at the end of the pass."""
        with self._exclusive.use():
            while True:
                self._exclusive.check_open()
                self._check_current(iteration)
                if made := self._reception.take():
                    self._advance(made[0])
                    return [made.pop().batch]
                if self._reception.steps.is_over:
                    self._end()
                    return []
                self._reception.wait(self._exclusive.woken)

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise UsageError(
                "another iteration of this RemoteSource has begun, or a state was loaded; use two, or end the first"
            )

    def _advance(self, made: Delivery) -> None:
        steps, terms = self._reception.steps, self._reception.senders.terms
        self._position = self._position.after(made, steps.due, steps.taken, terms.dataset if terms else "")
        self._is_over = steps.is_over

    def _end(self) -> None:
        terms = self._reception.senders.terms
        if terms and terms.steps == 0:
            self._position = self._position.empty(terms)
        self._is_over = True

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """The number of batches of the next iteration. Raises TypeError where it is not known, or not yet."""
        return self.batches_per_epoch - self._next.step - len(self._next.taken)

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of a pass. Raises TypeError where it is not known, or not yet."""
        if self._reception.senders.terms is None:
            with suppress(UsageError), self._exclusive.use():
                self._reception.receive_all()
        terms = self._reception.senders.terms
        if terms is None or terms.steps == UNKNOWN:
            reason = "no sender has connected yet" if terms is None else "the senders do not know it either"
            raise TypeError(f"the length of a pass is not known: {reason}")
        return terms.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON. It grows only with ``ordered=False`` and skipped records.

        Taken between two batches, it counts the first of them as delivered; after :meth:`load_state_dict`, in
        another process and with other senders, the iteration continues with the second.
        """
        position = self._next if self._is_over else self._position
        return position.to_json(self._reception.senders.terms)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next iteration where ``state`` was taken; the current iteration ends.

        From then on only senders with the terms in the state are admitted. Raises UsageError where the state
        is not valid or is of other batches; nothing is changed then.
        """
        position, terms = position_from_json(state)
        with self._exclusive.use():
            known = self._reception.senders.terms
            if terms and known and (difference := terms.difference(known)):
                raise UsageError(f"the state is of other batches than the senders make: {difference}")
            self._reception.senders.terms = terms or known
            self._begin(position)
            self._next = position

    def receipt(self) -> Receipt:
        """Return the receipt of the current pass, or of the last one, over all senders.

        For a Loader it counts the records that each epoch delivers, for a Flow steps.
        """
        terms = self._reception.senders.terms
        return self._position.receipt or Receipt(terms.dataset if terms else "", self._position.pass_number)

    def reload_keys(self) -> None:
        """Read the folder of allowed keys again; senders with removed keys are refused. Thread-safe.

        Raises UsageError and OperationError where the folder cannot be used; nothing is changed then.
        """
        self._auth.reload()

    def stats(self) -> RemoteStats:
        """Return the connected senders and the counts, which ``print`` shows as text. Thread-safe."""
        return self._reception.stats()

    def close(self) -> None:
        """End the senders, wake a waiting thread, and free the endpoint. Idempotent."""
        self._reception.sends_done = True
        self._exclusive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._exclusive.close()
