"""What commands share: options, messages and progress bars."""

from __future__ import annotations
