"""Arrays as frames of ZeroMQ messages."""

from .bounds import FrameDamaged
from .codec import read_head, unpack_batch
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
