"""Keys for several machines."""

from pathlib import Path

import pytest

from support.key_files import KeyFolder


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """The keys of a training machine, and of those that send to it."""
    return KeyFolder(tmp_path)
