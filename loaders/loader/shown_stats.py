"""Stats that are shown as a page, and in a notebook."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar


class ShownStats(ABC):
    """Stats of what feeds a training, with their JSON values. ``kind`` names what they are of."""

    kind: ClassVar[str]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""

    def to_html(self, path: str | os.PathLike[str] | None = None, *, name: str | None = None) -> str:
        """Return a page that shows the stages, what limits, and the course; also write it to ``path``.

        The page is one file without a script. ``name`` is in its title, by default what the stats are of.
        Raises OSError.
        """
        from shardprep.loaders.measuring.pages.run_page import run_page, save_page  # start-up time

        text = run_page(self.to_dict(), name=self.kind if name is None else name)
        if path is not None:
            save_page(text, path)
        return text

    def _repr_html_(self) -> str:
        from shardprep.loaders.measuring.pages.load_chart import load_chart  # start-up time

        return load_chart(self.to_dict())
