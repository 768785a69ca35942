"""Contact sheets: the pictures of a step in a grid, each with its record number, key and label."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.images.decode import png_of
from shardprep.formats.images.opencv import cv2
from shardprep.formats.runtime.files import save_bytes, user_path
from shardprep.loaders.loader.replay import Picture, Replayed, ReplayedRecord, pictures_of
from shardprep.loaders.transforms.contract import Transform

CELL = 160  # pixels per side of a picture
LEAST_CELL = 48
WIDEST = 2400
GAP = 8
LINE = 14  # pixels from one line of text to the next
SCALE = 0.36  # of OpenCV's font
TITLE = 26
MOST = 1024  # pictures in a sheet

PAPER, INK, FAINT, BAD = (250,) * 3, (30,) * 3, (110,) * 3, (190, 40, 40)


@dataclass(frozen=True)
class ContactSheet:
    """The contact sheet of a replayed step, as a PNG or a self-contained HTML page; it marks skipped records.

    ``transform`` is the loader's. Raises UsageError for a batch without images, or with more than 1024.
    """

    replayed: Replayed
    transform: Transform | None = None

    def png(self) -> bytes:
        """Return the sheet as a PNG file."""
        return png_of(self.drawn())

    def html(self) -> str:
        """Return the sheet as an HTML page, with each picture as it is in the batch."""
        from shardprep.formats.reports.pages import page  # start-up time: Jinja

        made = self.replayed
        facts = {"records": len(made), "skipped": len(made.skipped), "digest": made.digest()}
        records = [(record, picture is not None and png_of(picture)) for record, picture in self._shown()]
        return page("step", title=self._title, facts=facts, records=records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.png`` or ``.html`` file, replacing an existing one.

        Raises UsageError for another suffix, OSError, OperationError.
        """
        final = user_path(path).absolute()
        check_suffix(final)
        data = self.png() if final.suffix.lower() == ".png" else self.html().encode()
        save_bytes(final, data)

    def _shown(self) -> list[tuple[ReplayedRecord, Picture | None]]:
        """Return the records of the step with their pictures, None for skipped ones."""
        records = self.replayed.records
        if len(records) > MOST:
            raise UsageError(f"a sheet has at most {MOST} pictures, but the step has {len(records)}")
        pictures = iter(pictures_of(self.replayed.batch, self.transform))
        return [(record, next(pictures) if record.skipped is None else None) for record in records]

    def drawn(self) -> Picture:
        """Return the pixels of the sheet: uint8 [height, width, 3] in RGB."""
        shown = self._shown()
        columns = max(4, math.ceil(math.sqrt(1.4 * len(shown))))  # a little wider than high
        rows = max(1, math.ceil(len(shown) / columns))
        cell = max(LEAST_CELL, min(CELL, WIDEST // columns - GAP))
        height, width = cell + 3 * LINE + GAP, cell + GAP
        sheet: Picture = np.full((TITLE + GAP + rows * height, GAP + columns * width, 3), PAPER, np.uint8)
        _write(sheet, self._title, GAP, TITLE - 8, sheet.shape[1] - 2 * GAP)
        for place, (record, picture) in enumerate(shown):
            row, column = divmod(place, columns)
            x, y = GAP + column * width, TITLE + GAP + row * height
            _draw(sheet, picture, x, y, cell)
            _caption(sheet, record, x, y + cell, cell)
        return sheet

    @property
    def _title(self) -> str:
        made = self.replayed
        bad = f", {len(made.skipped)} skipped" if made.skipped else ""
        return f"epoch {made.epoch}, step {made.step}: {len(made)} records{bad}"


def check_suffix(path: Path) -> None:
    """Raise UsageError unless a sheet's name ends in .png or .html."""
    if path.suffix.lower() not in (".png", ".html"):
        raise UsageError("a sheet is a .png or .html file; use one of these suffixes", path=path)


def _draw(sheet: Picture, picture: Picture | None, x: int, y: int, cell: int) -> None:
    """Draw a picture centred in its cell; without one, a crossed frame."""
    if picture is None:
        cv2.rectangle(sheet, (x, y), (x + cell - 1, y + cell - 1), BAD)
        cv2.line(sheet, (x, y), (x + cell - 1, y + cell - 1), BAD)
        return
    height, width = picture.shape[:2]
    scale = cell / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    shown = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST)
    left, top = x + (cell - size[0]) // 2, y + (cell - size[1]) // 2
    sheet[top : top + size[1], left : left + size[0]] = shown


def _caption(sheet: Picture, record: ReplayedRecord, x: int, y: int, width: int) -> None:
    flip = " flip" if record.shown and record.shown.is_mirrored else ""
    what = "skipped" if record.skipped is not None else f"label {record.label}{flip}"
    lines = (record.key, f"#{record.number}", what)
    colours = (INK, FAINT, BAD if record.skipped is not None else FAINT)
    for at, (line, colour) in enumerate(zip(lines, colours, strict=True)):
        _write(sheet, line, x, y + (at + 1) * LINE - 3, width, colour)


def _write(sheet: Picture, text: str, x: int, y: int, width: int, colour: Sequence[int] = INK) -> None:
    """Write text, shortened in its middle to ``width`` pixels."""
    ascii_text = text.encode("ascii", "replace").decode()
    shown, kept = ascii_text, len(ascii_text)
    while cv2.getTextSize(shown, cv2.FONT_HERSHEY_SIMPLEX, SCALE, 1)[0][0] > width and kept > 2:
        kept -= 1
        shown = f"{ascii_text[: kept // 3]}..{ascii_text[len(ascii_text) - (kept - kept // 3) :]}"
    cv2.putText(sheet, shown, (x, y), cv2.FONT_HERSHEY_SIMPLEX, SCALE, tuple(colour), 1, cv2.LINE_AA)
