"""Where the repository, and what tests share, lies."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = os.pathsep.join(
    map(str, sorted((ROOT / "tests" / "support").glob("[a-z]*")))
)  # as PYTHONPATH has it
GOLDEN = ROOT / "tests" / "golden"
