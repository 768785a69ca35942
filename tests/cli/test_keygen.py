"""The command ``prep keygen``."""

import json
from pathlib import Path

import pytest

from shardprep.loaders.machines.keys import fingerprint, load_public, load_secret
from support.datasets import prep


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
