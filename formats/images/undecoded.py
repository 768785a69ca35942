"""Kinds of image files that are recognised, and refused by their names."""

from __future__ import annotations

from .kinds.image_info import decoded_wrongly, not_decoded

_NOT_DECODED = {
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL \r\n\x87\n": "JPEG XL",
    b"v/1\1": "OpenEXR",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"<svg": "SVG",
    b"%PDF": "PDF",
}
_DECODED_WRONGLY = {
    b"P7": "PAM",
    b"PF": "PFM",
    b"Pf": "PFM",
    b"#?RADIANCE": "Radiance HDR",
    b"#?RGBE": "Radiance HDR",
}
"""PAM loses its order of channels, and the floats of the others are cut off at 255."""


def refuse_undecoded(image: bytes) -> None:
    """Raise BadImage with its name for an image of a kind that OpenCV does not decode to its pixels."""
    for names, error in ((_NOT_DECODED, not_decoded), (_DECODED_WRONGLY, decoded_wrongly)):
        for signature, name in names.items():
            if image.startswith(signature):
                raise error(name)
