"""Arrays as frames of ZeroMQ messages."""

from __future__ import annotations

from shardprep.loaders.machines.codec import FrameDamaged, read_head, unpack_batch
from shardprep.loaders.machines.frames import FrameReceiver, send_batches
from shardprep.loaders.machines.ledger import SenderFailed
from shardprep.loaders.machines.link import ReceiverGone

__all__ = [
    "FrameDamaged",
    "FrameReceiver",
    "ReceiverGone",
    "SenderFailed",
    "read_head",
    "send_batches",
    "unpack_batch",
]
