"""The command ``prep keygen``."""

import json
import stat
from pathlib import Path

import pytest

from shardprep.loaders.machines.keys import fingerprint, load_public, load_secret
from support.datasets import prep
from support.sampling import torture_except


@pytest.mark.slow
def test_it_makes_a_pair_and_says_what_goes_where(tmp_path: Path) -> None:
    done = prep("keygen", "data1", cwd=tmp_path, check=True)

    secret, public, mark = done.stdout.splitlines()
    assert secret.startswith("data1.key_secret ")
    assert "stays on this machine" in secret
    assert public.startswith("data1.key ")
    assert "training machine's folder of allowed keys" in public
    assert "every data machine" in public
    key = load_public(tmp_path / "data1.key")
    assert mark.split() == ["fingerprint", fingerprint(key)]
    assert load_secret(tmp_path / "data1.key_secret").public == key
    assert stat.S_IMODE((tmp_path / "data1.key_secret").stat().st_mode) == 0o600
    assert done.stderr == ""


@pytest.mark.torture
def test_neither_key_is_printed(tmp_path: Path) -> None:
    made = [
        prep("keygen", "data1", *words, cwd=tmp_path, check=True) for words in ([], ["--force", "--json"])
    ]

    for done in made:
        secret = load_secret(tmp_path / "data1.key_secret")
        assert secret.secret.decode() not in done.stdout + done.stderr
        assert secret.public.decode() not in done.stdout + done.stderr


@pytest.mark.torture
def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = prep("keygen", tmp_path / "data1", "--json", check=True)

    pair = json.loads(done.stdout)
    assert pair["secret"] == f"{tmp_path}/data1.key_secret"
    assert pair["public"] == f"{tmp_path}/data1.key"
    assert pair["fingerprint"] == fingerprint(load_public(pair["public"]))


@pytest.mark.slow
def test_a_pair_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    prep("keygen", "data1", cwd=tmp_path, check=True)
    before = (tmp_path / "data1.key_secret").read_bytes()

    done = prep("keygen", "data1", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--force" in done.stderr
    assert (tmp_path / "data1.key_secret").read_bytes() == before
    prep("keygen", "data1", "--force", cwd=tmp_path, check=True)
    assert (tmp_path / "data1.key_secret").read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    torture_except(
        [([], 2), (["x.key"], 2), ([""], 2), (["a", "b"], 2), (["nowhere/data1"], 3), (["/proc/data1"], 3)],
        ([], 2),
        (["nowhere/data1"], 3),
    ),
    ids=["nothing", "a suffix", "an empty name", "two names", "no folder", "no place to write"],
)
def test_what_cannot_be_is_reported_in_one_line(tmp_path: Path, words: list[str], code: int) -> None:
    done = prep("keygen", *words, cwd=tmp_path)

    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
