"""The help of ``prep`` and of its commands."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from shardprep.cli.app import cli, run
from support.datasets import prep
from support.sampling import torture_except

GROUPS = {
    "Prepare": ["demo", "sample", "convert", "index", "join", "collect"],
    "Check and mend": ["verify", "repair"],
    "Look": ["inspect", "report"],
    "Move": ["publish", "fetch", "export"],
    "Train": ["bench-disk", "bench-loader", "replay", "serve", "keygen"],
}


def examples_of(command: str) -> list[str]:
    """The examples in a command's help, without ``prep`` and the command's name."""
    with cli.commands[command].make_context(command, [], resilient_parsing=True) as context:
        shown = cli.commands[command].get_help(context)
    return re.findall(rf"^    prep {command} ?(.*)$", shown.partition("Examples:\n")[2], re.M)


EXAMPLES = [(command, words) for command in cli.commands for words in examples_of(command)]


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_has_examples(command: str) -> None:
    assert 2 <= len(examples_of(command)) <= 3


@pytest.mark.parametrize(("command", "words"), EXAMPLES)
def test_an_example_can_be_parsed(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        (tmp_path / "shards" / split).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    with cli.commands[command].make_context(command, shlex.split(words)) as context:
        assert context.params


@pytest.mark.slow
@pytest.mark.parametrize("columns", torture_except([80, 100], 80))
def test_commands_stand_in_groups_in_the_order_of_work_with_whole_summaries(columns: int) -> None:
    shown = prep("--help", check=True, env=os.environ | {"COLUMNS": str(columns)}).stdout

    groups = [group.splitlines() for group in shown[shown.index("Prepare:\n") :].split("\n\n")]
    assert {title.removesuffix(":"): [row.split()[0] for row in rows] for title, *rows in groups} == GROUPS
    rows = [row for _, *rows in groups for row in rows]
    assert all(row.endswith(".") and not row.endswith("...") for row in rows)
    assert {len(row) - len(re.sub(r"^  \S+ +", "", row)) for row in rows} == {len("  bench-loader  ")}
    assert max(map(len, shown.splitlines())) <= columns


def test_every_command_is_in_one_group() -> None:
    assert sorted(cli.commands) == sorted(name for names in GROUPS.values() for name in names)


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_a_summary_fits_into_80_columns(command: str) -> None:
    summary = cli.commands[command].get_short_help_str(limit=200)

    assert len(summary) + max(map(len, cli.commands)) + 4 <= 78
    assert summary.endswith(".")


def test_prep_alone_on_a_terminal_shows_the_commands_to_begin_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert run([]) == 2

    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  prep ")]
    assert shown == ["demo", "convert", "verify", "report", "bench-loader"]
    assert set(shown) <= {name for names in GROUPS.values() for name in names}
