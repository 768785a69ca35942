"""Batches between machines, authenticated and exact."""

from __future__ import annotations

from shardprep.loaders.machines.keys import (
    NotAdmitted,
    PlaintextWire,
    ReceiverKeys,
    SenderKeys,
    WrongReceiver,
)
from shardprep.loaders.machines.link import Refused
from shardprep.loaders.machines.receive import RemoteSource
from shardprep.loaders.machines.reception import RemoteStats, SenderReport
from shardprep.loaders.machines.serve import SenderStats, serve

__all__ = [
    "NotAdmitted",
    "PlaintextWire",
    "ReceiverKeys",
    "Refused",
    "RemoteSource",
    "RemoteStats",
    "SenderKeys",
    "SenderReport",
    "SenderStats",
    "WrongReceiver",
    "serve",
]
