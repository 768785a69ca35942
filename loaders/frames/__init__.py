"""Arrays as frames of ZeroMQ messages."""

from .codec import FrameDamaged, read_head, unpack_batch
from .receiver import FrameReceiver, SenderFailed
from .sender import ReceiverGone, send_batches

__all__ = [
    "FrameDamaged",
    "FrameReceiver",
    "ReceiverGone",
    "SenderFailed",
    "read_head",
    "send_batches",
    "unpack_batch",
]
