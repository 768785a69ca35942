"""Where the repository, and what tests share, lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = str(ROOT / "tests")  # as PYTHONPATH has it
GOLDEN = ROOT / "tests" / "golden"
