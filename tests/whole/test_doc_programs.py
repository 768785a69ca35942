"""Every program in the documents runs as it stands, in a copy of the folder that ``prep demo`` leaves."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.reports.gate import KINDS, read_limits
from support.datasets import prep
from support.documents import PAGES, Block, blocks_of
from support.tensorflow_log import without_tensorflow_log

pytestmark = pytest.mark.slow

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
# An installation is run by .ci/run.
SHELL = [block for block in BLOCKS if block.language == "sh" and not block.text.startswith("pip install")]
RUN = [block for block in BLOCKS if block in PROGRAMS + SHELL]

PROGRESS = re.compile(r"^\d\d:\d\d:\d\d .*\n", re.M)

# The programs of other pages are run by `pytest -m torture`.
MAIN_PAGES = {page for page in PAGES if page.stem in ("README", "training", "flow", "storage")}

Ending = tuple[int, str]


def frameworks(block: Block) -> list[str]:
    """The frameworks that a block imports, and that the tests do not bring."""
    names = re.findall(
        r"^(?:from|import) (?:shardprep\.loaders\.)?"
        r"(torchvision|torch|jax|albumentations|lightning|accelerate|transformers|pycocotools)",
        block.text,
        re.M,
    )
    names += re.findall(r"^from shardprep import .*\bto_(torch|jax)\b", block.text, re.M)
    return [*dict.fromkeys(names)]


def missing(block: Block) -> list[str]:
    return [name for name in frameworks(block) if not is_importable(name)]


def is_importable(name: str) -> bool:
    """Whether a framework is installed; a torchvision for CUDA cannot be imported beside a torch for CPUs."""
    if importlib.util.find_spec(name) is None:
        return False
    return name != "torchvision" or ("+cpu" in version("torch")) <= ("+cpu" in version(name))


def parameter(block: Block) -> Any:
    marks = [pytest.mark.skipif(bool(missing(block)), reason=f"no {missing(block)}")]
    # test_from_tensorpack.py runs the block in its own process, with TensorFlow imported
    runs_elsewhere = block.page.name == "from-tensorpack.md" and "\nimport tensorflow" in block.text
    if block.page not in MAIN_PAGES or runs_elsewhere:
        marks.append(pytest.mark.torture)
    return pytest.param(block, marks=marks, id=" ".join([str(block), *frameworks(block)]))


def run(folder: Path, block: Block, environ: dict[str, str]) -> Ending:
    """The exit code, and stderr without progress."""
    program = folder / f"line{block.line}.{'py' if block.language == 'python' else 'sh'}"
    program.write_text(block.text)
    command = [sys.executable] if block.language == "python" else ["sh", "-eu"]
    try:
        done = subprocess.run(
            [*command, program.name], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired as error:
        return -1, str(error)
    reports = done.returncode == 0 and {"lightning", "transformers"} & {*frameworks(block)}  # on stderr
    return done.returncode, ("" if reports else PROGRESS.sub("", without_tensorflow_log(done.stderr)))


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment: ``prep`` is a command, and the extra cloudpickle is not installed."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "cloudpickle.py").write_text("raise ImportError('not installed')\n")
    (folder / "prep").write_text(f'#!/bin/sh\nexec {sys.executable} -m shardprep "$@"\n')
    (folder / "prep").chmod(0o755)
    return os.environ | {
        "PYTHONPATH": str(folder),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "NO_ALBUMENTATIONS_UPDATE": "1",  # its import asks the package index for a newer version
    }


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> dict[Block, Ending]:
    """How each block ended of the pages with one to be tested; two pages run at a time."""
    folder = tmp_path_factory.mktemp("documents")
    prep("demo", folder / "demo", check=True)
    tests = [each for each in request.session.items if isinstance(each, pytest.Function)]
    chosen = {each.callspec.params["block"].page for each in tests if "endings" in each.fixturenames}
    in_order = [block for block in RUN if block.page in chosen and not missing(block)]
    pages = [(page, list(blocks)) for page, blocks in groupby(in_order, key=lambda block: block.page)]
    pages.sort(key=lambda each: -len(each[1]))  # the longest page first

    def runs_of(page: Path, blocks: list[Block]) -> dict[Block, Ending]:
        copy = Path(shutil.copytree(folder / "demo", folder / page.stem, copy_function=os.link))  # read-only
        return {block: run(copy, block, environ) for block in blocks}

    with ThreadPoolExecutor(2) as pool:
        return dict(ChainMap(*pool.map(runs_of, *zip(*pages, strict=True))))


@pytest.mark.timeout(900)  # the first one waits for the programs of all pages that are tested
@pytest.mark.parametrize("block", [*map(parameter, RUN)])
def test_a_program_in_the_documents_runs(block: Block, endings: dict[Block, Ending]) -> None:
    assert endings[block] == (0, ""), block.text


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_settings_in_the_documents_are_those_of_a_gate(block: Block, tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_text(block.text)
    root, limits = read_limits(tmp_path / "gate.toml")

    assert root
    assert limits.keys() <= KINDS.keys()


def test_every_block_says_what_it_is_and_none_is_overlooked() -> None:
    assert len(BLOCKS) == sum(page.read_text().count("```") for page in PAGES) // 2
    assert {block.language for block in BLOCKS} <= {"python", "sh", "console", "text", "toml"}
    assert len(PROGRAMS) >= 28
    assert len(SHELL) >= 3
