"""A run that is killed after it has finished its output leaves a work folder, which the next run removes."""

import shutil
from pathlib import Path

import pytest

from support.datasets import converted, prep, tree, writable
from support.image_files import JPEG
from support.source_builders import write

STRACE = shutil.which("strace")
COMMANDS = {
    "convert": "convert images out --split train",
    "export to folders": "export dataset out --to folders",
    "export to mds": "export dataset out --to mds",
    "fetch": "fetch file://{here}/dataset out",
    "join": "join out --column size=sizes.csv",
    "repair": "repair out --source images",
    "publish": "publish dataset file://{here}/out",
}
KILLS = {"publish": ["rmdir", "rename", "linkat"]}
"""The system calls at which a command is killed: the first removal of a folder, if it is not named here."""


@pytest.mark.slow
@pytest.mark.skipif(not STRACE, reason="strace is not installed")
@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name in COMMANDS for call in KILLS.get(name, ["rmdir"])]
)
def test_what_a_killed_run_left_is_removed_by_the_same_command(name: str, call: str, tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / "images" / f"class{number % 2}" / f"{number}.jpg", JPEG)
    converted(tmp_path / "images", tmp_path / "dataset")
    (tmp_path / "sizes.csv").write_text(
        "key,size\n" + "".join(f"class{n % 2}/{n}.jpg,{n}\n" for n in range(6))
    )
    if name in ("join", "repair"):
        shutil.copytree(tmp_path / "dataset", tmp_path / "out")
    if name == "repair":
        writable(tmp_path / "out/index.npy").unlink()
    words = [*COMMANDS[name].format(here=tmp_path).split(), "--quiet"]
    kills = [str(STRACE), "-f", "-qq", "-o/dev/null", f"-einject={call}:signal=SIGKILL:when=1"]

    killed = prep(*words, prefix=kills, cwd=tmp_path)
    left = (tmp_path / "out/.prep").exists()
    done = prep(*words, cwd=tmp_path, check=True)

    assert (killed.returncode, left) == (-9, True)
    assert not (tmp_path / "out/.prep").exists(), done.stderr
    if name == "publish":
        assert tree(tmp_path / "out") == {
            file: data for file, data in tree(tmp_path / "dataset").items() if file != "provenance.json"
        }
    assert len(tree(tmp_path / "out")) > 2
