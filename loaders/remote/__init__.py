"""Batches between machines, authenticated and exact."""

from shardprep.loaders.remote.auth.endpoints import PlaintextWire
from shardprep.loaders.remote.auth.keys import ReceiverKeys, SenderKeys
from shardprep.loaders.remote.auth.sender_auth import NotAdmitted, WrongReceiver

from .remote_source import RemoteSource
from .sender_link import Refused
from .serve import serve
from .stats import RemoteStats, SenderReport, SenderStats

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
