"""The completion of command lines by a shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``prep`` is this program."""
    program = tmp_path / "bin" / "prep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardprep.cli "$@"\n')
    program.chmod(0o755)
    return os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def prep_for(instruction: str, environ: dict[str, str], **variables: str) -> str:
    """What ``prep`` prints for a shell."""
    asked = environ | {"_PREP_COMPLETE": instruction} | variables
    return subprocess.run(["prep"], env=asked, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_dataset_is_completed_as_a_folder(environ: dict[str, str]) -> None:
    assert prep_for("bash_complete", environ, COMP_WORDS="prep verify sh", COMP_CWORD="2").strip() == "dir,sh"


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_a_command_by_the_line_in_the_documents(environ: dict[str, str]) -> None:
    script = """
eval "$(_PREP_COMPLETE=bash_source prep)"
COMP_WORDS=(prep repa) COMP_CWORD=1
_prep_completion prep
echo "${COMPREPLY[@]}"
complete -p prep
"""

    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)

    assert done.stdout.splitlines()[0] == "repair", done.stderr
    assert "_prep_completion" in done.stdout.splitlines()[1]
