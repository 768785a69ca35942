"""What the documentation says holds: examples, names, commands."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
from datasets import prep
from tensorflow_log import without_tensorflow_log

import shardprep.cli
import shardprep.formats
import shardprep.loaders
from shardprep.cli.commands import cli
from shardprep.formats import convert

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = (shardprep.cli, shardprep.formats, shardprep.loaders)

MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    if not module.name.endswith(".__main__")
]


NEEDS = {"shardprep.loaders.torch_data": "torch", "shardprep.loaders.jax_data": "jax"}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("package", [shardprep.formats, shardprep.loaders], ids=lambda p: p.__name__)
def test_the_public_names_are_there_and_listed_once(package: object) -> None:
    names = getattr(package, "__all__", [])
    assert len(names) == len(set(names)) > 0
    assert all(hasattr(package, name) for name in names)


def masked(transcript: str) -> list[str]:
    """Lines without what differs from machine to machine: digests, sizes, the temporary folder."""
    for pattern in (r"[0-9a-f]{64}", r"prep-demo-\w+", r"\d[\d,.]* [KM]?B\b", r" +(?=\d|#)"):
        transcript = re.sub(pattern, "#", transcript)
    return transcript.splitlines()


def test_the_demo_prints_what_the_readme_shows_and_leaves_nothing_behind(tmp_path: Path) -> None:
    shown = README.split("<!-- demo transcript -->\n```console\n")[1].split("```")[0]

    printed = prep("demo", check=True, env=os.environ | {"TMPDIR": str(tmp_path)}).stdout

    assert masked(printed.replace(str(tmp_path), "/tmp")) == masked(shown)
    assert list(tmp_path.iterdir()) == []


PAGES = [README, *((ROOT / "docs" / name).read_text() for name in ("flow.md", "wire.md"))]
PROGRAMS = [program for page in PAGES for program in re.findall(r"```python\n(.*?)```", page, re.S)]


@pytest.fixture(scope="module")
def endings(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit code and stderr of each program, two at a time, where they find what they speak of."""
    folder = tmp_path_factory.mktemp("programs")
    convert(archives, folder / "shards", workers=0)

    def ending(number: int) -> tuple[int, str]:
        place = folder / str(number)
        place.mkdir()
        (place / "archives").symlink_to(archives)
        (place / "shards").symlink_to(folder / "shards")
        (place / "program.py").write_text(PROGRAMS[number])
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=place, capture_output=True, text=True, timeout=120
        )
        return done.returncode, without_tensorflow_log(done.stderr)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ending, range(len(PROGRAMS))))


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_in_the_documentation_run(number: int, endings: list[tuple[int, str]]) -> None:
    assert endings[number] == (0, ""), PROGRAMS[number]


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"prep {name}" in README


@pytest.mark.parametrize("words", sorted(set(re.findall(r"^\$? ?prep ([a-z-]+.*)$", README, re.M))))
def test_every_option_the_readme_uses_exists(words: str) -> None:
    command = cli.commands[words.split()[0]]
    known = {name for p in command.params if isinstance(p, click.Option) for name in p.opts} | {"--help"}
    assert {w.partition("=")[0] for w in words.split() if w.startswith("--")} <= known


LINKS = [
    (page, link)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for link in sorted(set(re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text())))
]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: str(value).rpartition("/")[2])
def test_every_link_of_the_documentation_leads_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()
