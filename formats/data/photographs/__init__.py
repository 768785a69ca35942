"""Twenty-five free photographs, the stuff of the sample dataset; see LICENSES.md."""

from __future__ import annotations
