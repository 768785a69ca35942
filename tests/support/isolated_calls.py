"""Calls to make in a separate process."""

import os
import time
from pathlib import Path


def killed_by(number: int) -> None:
    os.kill(os.getpid(), number)


def raises(error: BaseException) -> None:
    raise error


def sleeps(noted: Path) -> None:
    """Note the process's id, then sleep without end."""
    part = noted.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(noted)
    time.sleep(3600)
