"""What CI must not pass over: many failures that pass when repeated, and tests without their tools."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT
from support.sampling import torture_except

pytestmark = pytest.mark.slow

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_that_fails_once(number):
    seen = Path(f"{name}-{{number}}")
    if not seen.exists():
        seen.touch()
        raise AssertionError
"""


def test_every_file_of_tests_that_ci_names_is_there() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / ".ci/run").read_text())

    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("counts", "code"), [([1, 0, 2], 0), ([2, 2], 1)])
def test_at_most_three_tests_of_all_steps_are_repeated(counts: list[int], code: int, tmp_path: Path) -> None:
    (repeating,) = re.findall(r"^repeated=.*?^\}$", (ROOT / ".ci/run").read_text(), re.M | re.S)
    for step, count in enumerate(counts):
        text = FLAKY.format(count=count, name=step) if count else "def test_that_passes(): pass"
        (tmp_path / f"test_{step}.py").write_text(text)
    steps = [f"tests {sys.executable} -m pytest -q test_{step}.py" for step in range(len(counts))]
    script = "\n".join(["set -euo pipefail", repeating, *steps, 'echo "repeated ${#repeated[@]}"'])

    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert done.returncode == code, done.stdout
    assert (f"repeated {sum(counts)}\n" in done.stdout) == (code == 0)


ENDS = [
    ({"CI": ""}, "1 skipped"),
    ({"CI": "1"}, "1 error"),
    ({"CI": "1", "ALLOW_MISSING_TOOLS": "1"}, "1 skipped"),
]


@pytest.mark.parametrize(("environ", "found"), torture_except(ENDS, ENDS[1]))
def test_a_test_that_needs_a_missing_tool_fails_in_ci(
    environ: dict[str, str], found: str, tmp_path: Path
) -> None:
    (tmp_path / "python").symlink_to(sys.executable)  # and no strace
    command = [sys.executable, "-m", "pytest", "-q", "tests/net/test_fault_matrix.py", "-k", "ends and mds"]
    cleared = dict.fromkeys(("CI", "ALLOW_MISSING_TOOLS", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"), "")
    cleared["PYTEST_ADDOPTS"] = "-p no:cacheprovider"
    environ = os.environ | cleared | {"PATH": str(tmp_path)} | environ

    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    assert found in done.stdout, done.stdout + done.stderr
    assert done.returncode == (found == "1 error")
