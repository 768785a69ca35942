"""The gate: planted faults exceed their limits, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from shardprep.formats import GateCheck, GateResult, UsageError, gate, open_dataset, read_manifest
from shardprep.formats.reports.gate import _check, read_limits
from support.datasets import prep, prep_here
from support.examined import Made, made_datasets

Built = tuple[Path, Path, Made, set[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return made_datasets(tmp_path_factory.mktemp("made"))


def counts(made: Made, leaks: set[str]) -> dict[str, int]:
    """What was planted, as a gate counts it."""
    suspects = {key for pair in made.mislabelled for key in pair}
    return {
        "damaged": 1,
        "leaks": len(leaks),
        "mislabelled": len(suspects),
        "duplicates": len(made.exact - made.mislabelled),
        "similar": len(made.near - made.mislabelled),
        "empty-classes": 0,
        "quarantined": 0,
        "cmyk": 1,
        "exif-orientation": 1,
        "tiny": 1,
    }


def test_each_planted_fault_is_counted_and_just_exceeds_a_limit_of_one_less(built: Built) -> None:
    train, val, made, leaks = built
    planted = counts(made, leaks)

    fitting = gate(train, planted, against=val, workers=2)
    strict = gate(train, {name: max(0, n - 1) for name, n in planted.items()}, against=val, workers=2)

    assert {check.name: check.found for check in fitting.checks} == planted
    assert fitting.passed
    assert {check.name for check in strict.checks if not check.passed} == {n for n in planted if planted[n]}
    assert {*next(c for c in strict.checks if c.name == "leaks").records} <= leaks


def test_shares_are_of_the_records(built: Built) -> None:
    train, _, made, _ = built
    with open_dataset(train) as ds:
        records = len(ds)
    share = len(made.exact - made.mislabelled) / records

    assert gate(train, {"duplicates": share}, workers=0).passed
    assert gate(train, {"duplicates": share + 1e-9}, workers=0).passed
    assert not gate(train, {"duplicates": share - 1e-9}, workers=0).passed


def test_a_share_is_exact_as_it_is_written() -> None:
    observed = {
        "kind": "CMYK",
        "leave_out": [],
        "count": 29,
        "records": [],
        "pairs": [],
        "names": [],
        "is_partial": 0,
    }
    found: Any = SimpleNamespace(found={"observations": [observed], "dataset": {"records": 100}})

    assert 29 > 0.29 * 100
    assert _check("cmyk", 0.29, found).passed
    assert not _check("cmyk", 0.2899, found).passed


def test_another_root_fails_before_anything_is_read(built: Built) -> None:
    train = built[0]
    root = read_manifest(train).root

    assert gate(train, {}, root=root).passed
    found = gate(train, {"damaged": 0}, root="sha256:00")

    assert [check.name for check in found.checks] == ["root"]
    assert not found.passed
    assert (found.looked_at, str(found.checks[0])) == (0, f"{root}, not sha256:00")


def test_a_limit_of_the_index_alone_reads_no_image(built: Built) -> None:
    assert gate(built[0], {"cmyk": 0, "empty-classes": 0}).looked_at == 0


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        ({}, {}, "needs a root, canaries or a limit"),
        ({"ducks": 0}, {}, "no limit 'ducks'; limits are damaged, leaks"),
        ({"leaks": 0}, {}, "needs another dataset"),
        ({"damaged": 0}, {"pixels": "none"}, "a limit of damaged needs images"),
        ({"damaged": -1}, {}, "a number of records, or a share below 1, not -1"),
        ({"damaged": 1.5}, {}, "not 1.5"),
        ({"damaged": float("nan")}, {}, "not nan"),
        ({"damaged": True}, {}, "not True"),
        ({"damaged": "0"}, {}, "not '0'"),
    ],
)
def test_a_gate_that_means_nothing_is_an_error(
    built: Built, limits: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        gate(built[0], limits, **options)


def test_the_command_exits_with_one_and_says_which_records(built: Built, tmp_path: Path) -> None:
    train, val, _, leaks = built
    (tmp_path / "gate.toml").write_text("[max]\nleaks = 0\nduplicates = 0.5\ndamaged = 1\n")
    words = ["gate", train, "--against", val, "--limits", tmp_path / "gate.toml", "--workers", 2]

    strict = prep(*words, "--junit", tmp_path / "gate.xml")
    typed = prep_here(*words, "--max-leaks", len(leaks), "--json")

    assert strict.returncode == 1
    assert f"FAIL  leaks         {len(leaks)}, at most 0" in strict.stdout
    assert all(key in strict.stdout for key in leaks)
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()  # noqa: S314 - made here
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert {*(suite.find("testcase[@name='leaks']/failure").text or "").split()} == leaks  # type: ignore[union-attr]
    assert typed.returncode == 0
    assert json.loads(typed.stdout)["passed"] is True


def test_each_split_of_a_folder_is_checked(built: Built, tmp_path: Path) -> None:
    folder = built[0].parent
    done = prep_here("gate", folder, "--max", "tiny=0", "--max-damaged", "0.5", "--junit", tmp_path / "g.xml")
    rooted = prep_here("gate", folder, "--root", "sha256:00")

    assert done.returncode == 1
    assert "1 of 2 passed" in done.stdout
    assert len(list(tmp_path.glob("g-*.xml"))) == 2
    assert (rooted.returncode, "a root is of one of them" in rooted.stderr) == (2, True)


@pytest.mark.parametrize("text", ["[max", "max = 3", "root = 5", "[least]\nleaks = 1", "\udcff"])
def test_a_file_of_something_else_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(UsageError):
        read_limits(tmp_path / "gate.toml")


@given(keys=st.lists(st.text(), max_size=4), path=st.text())
def test_any_key_and_path_make_xml_that_parses(keys: list[str], path: str) -> None:
    check = GateCheck("leaks", False, len(keys), 0, tuple(keys))

    suite = ElementTree.fromstring(GateResult(path, "sha256:0", 9, 9, (check,)).to_junit())  # noqa: S314

    assert suite.find("testcase/failure") is not None
