"""What other processes or machines send, into TensorFlow."""

from __future__ import annotations

from typing import Any

from ...formats.errors import UsageError
from ..frame_receiver import FrameReceiver
from ..frames import DEFAULT_LIMIT
from ..passes import Passes
from .fed_input import FedInput
from .queue_input import fed_queue
from .signature import capacity_of, fixed_bytes, signature_of


class ZMQInput(FedInput):
    """A ``tf.queue.FIFOQueue`` filled with the batches that :func:`.frame_sender.send_batches` sends to ``endpoint``.

    ``signature`` has a ``tf.TensorSpec`` for each part of a batch; it must be given, since waiting for a first batch
    would hang where no sender comes. An epoch is over when each of ``senders`` senders has sent all of its own,
    and raises :class:`.frame_receiver.SenderFailed` where one fails or is gone; batches that are not what the
    signature says raise UsageError. ``capacity`` is a number of batches, or a size (``"512MiB"``) where the
    signature leaves no dimension open. The rest is as in :class:`.frame_receiver.FrameReceiver`, which this owns:
    there is no authentication, so the endpoint belongs on loopback or on a network that is trusted.

    Used as :class:`QueueInput` is, in eager mode and in v1 graphs. Batches arrive in memory that TensorFlow takes
    as it is. Closing it frees the endpoint and wakes who waits.
    """

    def __init__(
        self,
        endpoint: str,
        signature: Any,
        *,
        senders: int = 1,
        capacity: int | str | None = None,
        bind: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
    ) -> None:
        if signature is None:
            raise UsageError("give a signature: what the senders will send is not known before they do")
        receiver = FrameReceiver(endpoint, senders=senders, bind=bind, limit_bytes=limit_bytes)
        try:
            passes = Passes(receiver)
            element_spec = signature_of(passes, signature)
            if isinstance(capacity, str) and fixed_bytes(element_spec) is None:
                raise UsageError(
                    "a capacity in bytes needs a signature of fixed size; give a number of batches"
                )
            room = capacity_of(passes, capacity, element_spec)
            queue, feeder = fed_queue(passes, element_spec, room, on_close=receiver.close)
        except BaseException:
            receiver.close()
            raise
        self._receiver = receiver
        super().__init__(passes, element_spec, queue, feeder)

    def close(self) -> None:
        self._receiver.close()  # first, or the senders would hear that the epoch was left, and go on to the next
        super().close()

    @property
    def endpoint(self) -> str:
        """Where it is to be reached, with the port that was chosen for ``*``."""
        return self._receiver.endpoint

    @property
    def rejected(self) -> int:
        """How many messages were dropped for being damaged, or nobody's that was let in."""
        return self._receiver.rejected
