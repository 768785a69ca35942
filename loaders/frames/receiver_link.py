"""A sender's connection to a receiver, as both protocols use it."""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import zmq

from shardprep.formats.system.owned import Owned

from .bounds import FrameDamaged
from .codec import Head, read_head
from .frame_socket import (
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    FrameSocket,
    Message,
    Security,
)

RECONNECT_INTERVAL_MS = 100


class ReceiverLink(Owned, ABC):
    """The socket of a sender. It handles messages of the receiver while it waits. Not thread-safe.

    ``max_note_bytes`` bounds the buffers of these messages.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        watched: int,
        max_note_bytes: int,
        bind: bool = False,
        max_reconnect_ms: int = 0,
        security: Security | None = None,
    ) -> None:
        self._endpoint = endpoint
        options: dict[int, int] = {
            zmq.SNDHWM: 0,  # the receiver's credit or leases bound it
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: max_note_bytes,
            zmq.RECONNECT_IVL: RECONNECT_INTERVAL_MS,
            zmq.RECONNECT_IVL_MAX: max_reconnect_ms,
            zmq.IMMEDIATE: 0,  # with 1, what a receiver sends right before it closes would be lost
        }
        self._socket = FrameSocket(
            zmq.DEALER, endpoint, bind=bind, options=options, watched=watched, security=security
        )

    @abstractmethod
    def _receive_all(self) -> None:
        """Handle all events and messages that have arrived."""

    @abstractmethod
    def _handle(self, message: Message, head: Head) -> None:
        """Handle one message. Raises FrameDamaged where it is to be dropped."""

    def _check(self) -> None:
        """Raise where the receiver is lost."""

    def _on_wait(self) -> None:
        """Called before each wait for the receiver."""

    def _handle_messages(self) -> None:
        while message := self._socket.receive():
            with suppress(FrameDamaged):
                self._handle(message, read_head(message.parts[0]))

    def _await(self, holds: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Handle messages until ``holds()``; return False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            self._receive_all()
            if holds():
                return True
            self._check()
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._on_wait()
            self._socket.wait(min(POLL_INTERVAL_S, remaining))

    def _await_sent(self, tracker: zmq.MessageTracker) -> None:
        """Handle messages until the memory of a message may be used again."""
        while True:
            try:
                return tracker.wait(POLL_INTERVAL_S)
            except zmq.NotDone:
                self._receive_all()
                self._check()

    def __enter__(self) -> Self:
        return self


def error_text(error: BaseException) -> str:
    """The end of the traceback, short enough for an ERROR frame."""
    return "".join(traceback.format_exception(error))[-MAX_TEXT_CHARACTERS:]
