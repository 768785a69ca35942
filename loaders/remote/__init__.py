"""Batches between machines, authenticated and exact."""

from .endpoints import PlaintextWire
from .handshake import NotAdmitted, WrongReceiver
from .link import Refused
from .remote_source import RemoteSource
from .remote_stats import RemoteStats, SenderReport
from .security import ReceiverKeys, SenderKeys
from .sender import serve
from .sender_stats import SenderStats

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
