"""Paths of the repository and of the tests' shared files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = str(ROOT / "tests")  # as PYTHONPATH has it
GOLDEN = ROOT / "tests" / "golden"
