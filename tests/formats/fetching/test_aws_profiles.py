"""Keys and the region of S3 come from the environment, then from a profile in ~/.aws."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shardprep.formats import UsageError, fetch
from shardprep.formats.errors import ShardprepError
from support.object_server import as_endpoint

pytest.importorskip("obstore")

CREDENTIALS = """
[default]
aws_access_key_id = AKIADEFAULT
aws_secret_access_key = 50%secret
[work]
aws_access_key_id = AKIAWORK
aws_secret_access_key = secret
aws_session_token = a-token
"""
CONFIG = """
[default]
region = eu-west-1
s3 =
    max_concurrent_requests = 20
[profile work]
region = ap-south-1
[profile sso]
sso_session = company
region = us-west-2
"""


class Seen(BaseHTTPRequestHandler):
    signatures: list[str]

    def do_GET(self) -> None:
        found = re.search("Credential=([^/]+)/[^/]+/([^/]+)/", self.headers.get("Authorization", ""))
        self.signatures.append(
            " ".join((*found.groups(), self.headers.get("X-Amz-Security-Token", ""))).strip() if found else ""
        )
        self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What a server of S3 is signed with, while the environment has an endpoint and a home with profiles."""
    handler = type("Handler", (Seen,), {"signatures": []})
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        as_endpoint(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        for name in [name for name in os.environ if name.startswith("AWS_") and "ENDPOINT" not in name]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        yield handler.signatures
        server.shutdown()


@pytest.mark.parametrize(
    ("environ", "signature"),
    [
        ({}, "AKIADEFAULT eu-west-1"),
        ({"AWS_PROFILE": "default"}, "AKIADEFAULT eu-west-1"),
        ({"AWS_PROFILE": "work"}, "AKIAWORK ap-south-1 a-token"),
        ({"AWS_PROFILE": "work", "AWS_REGION": "eu-north-1"}, "AKIAWORK eu-north-1 a-token"),
        ({"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "x"}, "AKIAENV eu-west-1"),
        ({"AWS_SKIP_SIGNATURE": "true"}, ""),
    ],
    ids=str,
)
def test_keys_are_those_of_the_environment_then_of_the_profile(
    environ: dict[str, str],
    signature: str,
    signatures: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardprepError) as raised:
        fetch("s3://bucket/train", tmp_path / "copy")

    assert set(signatures) == {signature}
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"AWS_PROFILE": "sso"}, "'sso', which AWS_PROFILE names, has no keys; eval"),
        ({"AWS_PROFILE": "misspelt"}, "'misspelt', which AWS_PROFILE names, is not in"),
        ({"AWS_CONFIG_FILE": __file__}, "test_aws_profiles.py: is no file of profiles"),
    ],
    ids=str,
)
def test_a_profile_without_keys_says_what_to_do(
    environ: dict[str, str],
    message: str,
    signatures: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        fetch("s3://bucket/train", tmp_path / "copy")
    assert not signatures
