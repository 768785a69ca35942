"""An input of batches that other processes or machines send."""

from __future__ import annotations

from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes
from shardprep.loaders.frames.codec import DEFAULT_LIMIT
from shardprep.loaders.frames.receiver import FrameReceiver
from shardprep.loaders.tf_inputs.tensors.signature import capacity_of, fixed_bytes, signature_of

from .fed_input import FedInput
from .queue_input import fed_queue


class ZMQInput(FedInput):
    """A ``tf.queue.FIFOQueue`` of the batches that :func:`.frame_sender.send_batches` sends to ``endpoint``.

    ``signature`` has a ``tf.TensorSpec`` for each part of a batch. It must be given, because waiting for a
    first batch would hang where no sender comes. An epoch is over when each of ``senders`` senders has sent
    its own epoch. ``capacity`` is a number of batches, or a size (``"512MiB"``) where the signature leaves no
    dimension open; the default is 2 batches. ``bind`` and ``limit_bytes`` are as for
    :class:`.frame_receiver.FrameReceiver`, which this input owns. There is no authentication: use an
    ``endpoint`` on loopback or in a trusted network.

    It is used as :class:`QueueInput` is, in eager mode and in v1 graphs. Batches are received into memory
    that TensorFlow uses without a copy. Closing the input frees the endpoint and wakes waiting threads. Steps
    raise :class:`.frame_receiver.SenderFailed` where a sender fails or is gone, and UsageError for batches
    that do not match the signature. Raises UsageError for arguments that are none of these.
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
            raise UsageError("give a signature: it is not known before a sender has sent a batch")
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
        self._receiver.close()  # first: otherwise the senders would see an epoch ended early, and begin the next
        super().close()

    @property
    def endpoint(self) -> str:
        """The address for senders, with the port that was chosen for ``*``."""
        return self._receiver.endpoint

    @property
    def rejected(self) -> int:
        """The number of messages that were dropped: damaged, or not from an accepted sender."""
        return self._receiver.rejected
