"""Where the repository, and what tests share, lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
GOLDEN = ROOT / "tests" / "golden"
