"""The endpoints that may be used without keys."""

import os
from pathlib import Path

import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.machines.keys import PlaintextWire, check_endpoint
from support.datasets import is_root
from support.key_files import KeyFolder


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


EXPOSED = [
    "tcp://*:5555",
    "tcp://0.0.0.0:5555",
    "tcp://10.0.0.1:5555",
    "tcp://eth0:5555",
    "tcp://lo:5555",
    "tcp://training:5555",
    "tcp://localhost.example.org:5555",
    "tcp://127.0.0.1.example.org:5555",
    "tcp://127.0.0.1:0;10.0.0.1:5555",
    "tcp://localhost:0;10.0.0.1:5555",
    "tcp://[::]:5555",
    "tcp://[::ffff:10.0.0.1]:5555",
    "tcp://5555",
    "tcp://",
]


@pytest.mark.parametrize("endpoint", EXPOSED)
def test_an_endpoint_that_others_reach_needs_keys_or_insecure(endpoint: str, keys: KeyFolder) -> None:
    with pytest.raises(UsageError, match="prep keygen"):
        check_endpoint(endpoint, None)
    with pytest.warns(PlaintextWire, match="no keys"):
        check_endpoint(endpoint, None, insecure=True)
    check_endpoint(endpoint, keys.receiver)
    check_endpoint(endpoint, keys.sender(), insecure=True)


@pytest.mark.parametrize(
    "endpoint", ["inproc://here", "epgm://239.0.0.1:1", "127.0.0.1:5555", "ipc://@abstract", "ipc://*"]
)
@pytest.mark.parametrize("insecure", [False, True])
def test_an_endpoint_that_cannot_be_secured_is_refused_even_with_keys(
    endpoint: str, insecure: bool, keys: KeyFolder
) -> None:
    for given in (None, keys.receiver):
        with pytest.raises(UsageError):
            check_endpoint(endpoint, given, insecure=insecure)


def test_a_local_socket_in_another_user_s_folder_is_refused(tmp_path: Path) -> None:
    if not is_root():
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 65534, 65534)

    with pytest.raises(UsageError, match="folder of your own"):
        check_endpoint(f"ipc://{tmp_path}/frames", None)


def test_a_local_socket_in_no_folder_is_an_operation_error(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="make the folder"):
        check_endpoint(f"ipc://{tmp_path}/nowhere/frames", None)
