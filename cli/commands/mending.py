"""What mends a damaged dataset: the next command, with the arguments that work."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardprep.cli.console.output import say, say_next
from shardprep.formats import Report
from shardprep.formats.containers.archive import ARCHIVE_NAME
from shardprep.formats.containers.published_file import read_small
from shardprep.formats.dataset.manifest import MANIFEST_NAME, PROVENANCE_NAME, WORK_FOLDER_NAME
from shardprep.formats.errors import DataError

from .convert import convert
from .index import index

MOST_PROVENANCE_BYTES = 1 << 20

GOES_ON = "next: the prep command that began it, such as prep convert; it goes on from there"
CONVERT_AGAIN = (
    "next: the prep convert command that made it (provenance.json has it), into another folder; or put "
    "manifest.json back from a copy"
)
NO_DATASET = "next: give a folder that prep convert made; nothing of it is here"
BAD_IN_SOURCE = (
    "next: these records are as they were published; prep convert with --decode-check --on-bad-image skip, into "
    "another folder, leaves bad images out"
)
JOIN_AGAIN = "next: the prep join command that added {}; it builds damaged files again, to the same bytes"
ARCHIVE_CHANGED = "next: put the archive that was indexed back, or repeat the prep index command with the place where it is now"
PUBLISH_AGAIN = "next: publish the dataset there again, from a copy that prep verify finds intact"
FOREIGN = "next: move what does not belong to the dataset to another place"


def say_what_mends(report: Report) -> None:
    """Print what to do about the findings; nothing if there are none."""
    if not report.findings:
        return
    if report.url is not None:
        say(PUBLISH_AGAIN)
        return
    files = {file.name for file in report.manifest.files} if report.manifest else set()
    found = {finding.file for finding in report.findings}
    if report.manifest is None or MANIFEST_NAME in found:
        say(
            GOES_ON
            if not files and (report.dataset / WORK_FOLDER_NAME).is_dir()
            else _converted_again(report)
        )
    elif names := _joined_columns(report, found):
        say(JOIN_AGAIN.format(" and ".join(names)))
    elif report.manifest.archive and any(f.file == ARCHIVE_NAME or f.key for f in report.findings):
        say(ARCHIVE_CHANGED)
    elif any(finding.file in files and finding.key is None for finding in report.findings):
        say_next("repair", report.dataset, *_source_of(report.dataset))
    else:
        say(BAD_IN_SOURCE if found & files else FOREIGN)


def _joined_columns(report: Report, found: set[str]) -> list[str]:
    """Return the joined columns that are damaged, if nothing else is: prep repair comes first."""
    manifest = report.manifest
    if manifest is None or manifest.columns is None:
        return []
    files = {file.name: name for name in manifest.joined for file in manifest.columns[name].files}
    is_all = found & {file.name for file in manifest.files} <= files.keys()
    return sorted({files[name] for name in found & files.keys()}) if is_all else []


def _converted_again(report: Report) -> str:
    made = any((report.dataset / name).exists() for name in (MANIFEST_NAME, PROVENANCE_NAME))
    return CONVERT_AGAIN if made else NO_DATASET


def _source_of(dataset: Path) -> list[str | Path]:
    """Return the options that name the dataset's source; a placeholder if it is not known, or not there."""
    try:
        options = _recorded_source(dataset)
    except (OSError, DataError, ValueError, TypeError, KeyError, RecursionError, click.ClickException):
        options = []  # the provenance is in no hash, and may hold anything
    return options if "--source" in options else ["--source", "SOURCE"]


def _recorded_source(dataset: Path) -> list[str | Path]:
    """Return the options from the command that made the dataset, if that is known."""
    made = json.loads(read_small(dataset / PROVENANCE_NAME, MOST_PROVENANCE_BYTES))
    folder, (_, name, *words) = Path(made["folder"]), map(str, made["command"])
    command = {one.name: one for one in (convert, index)}.get(name)
    if command is None:
        return []
    given = command.make_context(name, words, resilient_parsing=True).params
    given.setdefault("source", given.get("archives"))
    places = {name: folder / given[name] for name in ("source", "root") if given.get(name) is not None}
    options = ((f"--{name}", _short(path)) for name, path in places.items() if path.exists())
    return [part for option in options for part in option]


def _short(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
