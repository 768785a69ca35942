"""What the documentation says holds: docstrings, transcripts, commands, links, words."""

import configparser
import doctest
import importlib
import os
import re
from pathlib import Path

import click
import h5py
import lmdb
import pytest
from pygments.lexers import BashSessionLexer

import shardprep.cli
import shardprep.formats
import shardprep.loaders
from shardprep.cli.app import cli
from support.datasets import prep
from support.documents import DOCS, INDEX, PAGES, README, ROOT, anchors_of, block_after, blocks_of, links_of

NEEDS = {
    "shardprep.loaders.torch_data": "torch",
    "shardprep.loaders.jax_data": "jax",
    "shardprep.loaders.prometheus": "prometheus_client",
    "shardprep.loaders.transforms.torchvision": "support.torchvision_ops",
    "shardprep.loaders.transforms.albumentations": "albumentations",
}
CONVERTING = ROOT / "docs" / "datasets" / "converting.md"


MODULES = {
    ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for package in (shardprep.cli, shardprep.formats, shardprep.loaders)
    for folder in map(Path, package.__path__)
    for path in sorted(folder.rglob("*.py"))
    if path.stem != "__main__"
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODULES))
def test_docstring_examples_hold(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    done = doctest.testmod(importlib.import_module(name))
    assert (done.attempted, done.failed) == (len(re.findall(r"^\s*>>> ", MODULES[name].read_text(), re.M)), 0)


def masked(transcript: str) -> list[str]:
    """Lines without what differs from machine to machine: sizes, the folder, roots made by other writers."""
    are_equal = (lmdb.version(), h5py.version.hdf5_version) == ((0, 9, 36), "1.14.6")  # of the roots shown
    digests = [] if are_equal else [r"(?<=sha256:)[0-9a-f]{64}"]
    for pattern in (*digests, r"prep-demo-\w+", r"\d[\d,.]* [KM]?B\b", r" +(?=\d|#)"):
        transcript = re.sub(pattern, "#", transcript)
    return transcript.splitlines()


@pytest.mark.slow
def test_the_demo_prints_what_the_documents_show_and_leaves_nothing_behind(tmp_path: Path) -> None:
    shown = block_after(CONVERTING, "demo transcript").text

    printed = prep("demo", check=True, env=os.environ | {"TMPDIR": str(tmp_path)}).stdout

    assert masked(printed.replace(str(tmp_path), "/tmp")) == masked(shown)
    assert list(tmp_path.iterdir()) == []


def test_the_readme_is_short_and_shows_parts_of_that_transcript_line_by_line() -> None:
    whole = block_after(CONVERTING, "demo transcript").text
    parts = block_after(README, "demo excerpt").text.split("...\n")

    places = [whole.find("\n" + part) for part in parts]

    assert len(parts) >= 4
    assert -1 not in places
    assert places == sorted(places)
    assert README.stat().st_size <= 12_000


def test_the_html_has_every_page() -> None:
    listed = re.findall(
        r"^(?:.*<)?([A-Za-z0-9_/*-]+)>?$", INDEX.read_text().split("```{toctree}", 1)[1], re.M
    )
    shown = {
        path.relative_to(ROOT / "docs") for name in listed for path in (ROOT / "docs").glob(f"{name}.md")
    }
    assert shown == {path.relative_to(ROOT / "docs") for path in DOCS}


def test_the_tables_of_the_documents_have_every_page_once_but_decisions() -> None:
    listed = re.findall(r"^\| \[.*?\]\((.*?)\)", (ROOT / "docs" / "README.md").read_text(), re.M)
    pages = [page for page in DOCS if page.parent.name != "decisions"]
    there = {str(page.relative_to(ROOT / "docs")) for page in pages} - {"README.md"}
    assert sorted(listed) == sorted(there | {"api.rst"})


def test_the_glossary_has_every_term_once() -> None:
    words = ", ".join(re.findall(r"^\| (.*?) \|", (ROOT / "docs/glossary.md").read_text(), re.M)).split(", ")
    assert len(words) == len(set(words)) > 40


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"prep {name}" in README.read_text()


SHELL = [block for page in PAGES for block in blocks_of(page) if block.language in ("sh", "console")]
COMMANDS = {words for b in SHELL for words in re.findall(r"^(?:\$ )?prep ([a-z-]+.*)$", b.text, re.M)}


def test_commands_can_be_highlighted() -> None:
    kinds = {str(kind) for block in SHELL for kind, _ in BashSessionLexer().get_tokens(block.text)}
    assert "Token.Error" not in kinds


@pytest.mark.parametrize("words", sorted(COMMANDS))
def test_every_option_that_the_documents_use_exists(words: str) -> None:
    words = words.partition(" #")[0]
    options = [p for p in cli.commands[words.split()[0]].params if isinstance(p, click.Option)]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    assert set(re.findall(r"(?<!\S)\[?(--[a-z0-9-]+)", words)) <= known


def test_every_option_of_convert_is_in_its_table() -> None:
    listed = re.findall(r"^\| `(--[a-z0-9-]+)", CONVERTING.read_text(), re.M)
    options = [p.opts[0] for p in cli.commands["convert"].params if isinstance(p, click.Option)]
    assert sorted(listed) == sorted(set(options) - {"--json"})


LINKS = [(page, link) for page in PAGES for link in links_of(page)]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_every_link_of_the_documentation_leads_somewhere(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    assert target.exists()
    assert not anchor or anchor in anchors_of(target)


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    version, is_developed, _ = config["metadata"]["version"].partition(".dev")
    heading = re.findall("^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]

    assert heading == (f"{version} (unreleased)" if is_developed else version)
