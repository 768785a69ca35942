"""Options, messages and progress bars shared by all commands."""

from __future__ import annotations
