"""One line of state on stderr: renewed in its place on a terminal, now and then in a log."""

from __future__ import annotations

import time
from typing import Any, Self

from tqdm import tqdm

from .progress import LINE_INTERVAL_S, Form, new_bar, stamped

SHARE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
TEXT_ONLY = "{desc}"


class StatusLine:
    """The state of work that does not count images; ``bar_format`` is SHARE or TEXT_ONLY."""

    def __init__(self, form: Form, bar_format: str) -> None:
        self._form, self._bar_format = form, bar_format
        self._bar: tqdm[Any] | None = None
        self._next = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Self:
        if self._form == "bar":
            self._bar = new_bar(total=100, bar_format=self._bar_format)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, text: str, share: float = 0.0) -> None:
        """Show the text, and the share of the work that is done; in a log at most every 30 seconds."""
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(round(share * 100) - self._bar.n)
            self._bar.refresh()
        elif self._form == "plain" and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL_S
            stamped(f"{text}, {share:.0%}" if share else text)
