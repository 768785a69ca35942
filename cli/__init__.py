"""The command ``prep``."""

from __future__ import annotations
