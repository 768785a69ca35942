"""Which key files each end of a wire uses."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceiverKeys:
    """The training machine's: its own ``NAME.key_secret``, and the folder of the ``*.key`` that may send to it.

    Paths only, read when a socket is opened. Picklable.
    """

    secret: str | os.PathLike[str]
    allowed: str | os.PathLike[str]


@dataclass(frozen=True)
class SenderKeys:
    """A data machine's: its own ``NAME.key_secret``, and the training machine's ``NAME.key``.

    Paths only, read when a socket is opened. Picklable.
    """

    secret: str | os.PathLike[str]
    receiver: str | os.PathLike[str]
