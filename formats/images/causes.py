"""The causes for which images are bad, by the messages of BadImage."""

from __future__ import annotations

from .kinds.image_info import CONVERT_IT

DAMAGED = "damaged"
_CAUSES = ("not an image", "truncated", "too large", "does not decode", "crashes the decoder")


def cause_of(reason: str) -> str:
    """Return the cause in a message, without what is particular to one image: "truncated", or "damaged".

    That of an image of a kind that is not decoded names the kind: "HEIC, which OpenCV does not decode".
    """
    if reason.endswith(CONVERT_IT):
        return reason.removesuffix(CONVERT_IT)
    return next((cause for cause in _CAUSES if reason.startswith(cause)), DAMAGED)
