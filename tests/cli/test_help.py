"""The help of ``prep`` and of its commands."""

import sys

import pytest

from shardprep.cli.app import run

GROUPS = {
    "Prepare": ["demo", "sample", "convert", "index", "join", "collect"],
    "Check and mend": ["verify", "repair", "gate"],
    "Look": ["inspect", "report", "find"],
    "Move": ["publish", "fetch", "export"],
    "Train": ["bench-disk", "bench-loader", "replay", "prove", "serve", "keygen"],
}


def test_prep_alone_on_a_terminal_shows_the_commands_to_begin_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert run([]) == 2

    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  prep ")]
    assert shown == ["demo", "convert", "verify", "report", "bench-loader"]
    assert set(shown) <= {name for names in GROUPS.values() for name in names}
