"""The sub-commands of ``prep``, one per file."""

from __future__ import annotations
