"""The endpoints that may be used without keys."""

import os
import warnings
from pathlib import Path

import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.machines.keys import PlaintextWire, check_endpoint
from support.datasets import is_root
from support.key_files import KeyFolder


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:*", "tcp://127.0.0.1:5555", "tcp://127.9.8.7:1", "tcp://localhost:1", "tcp://[::1]:1"],
)
def test_loopback_needs_no_keys(endpoint: str) -> None:
    check_endpoint(endpoint, None)


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


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_local_socket_in_a_private_folder_needs_no_keys(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)

    check_endpoint(f"ipc://{tmp_path}/frames", None)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_local_socket_where_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)

    with pytest.raises(UsageError, match="chmod 700"):
        check_endpoint(f"ipc://{tmp_path}/frames", None)
    with pytest.warns(PlaintextWire):
        check_endpoint(f"ipc://{tmp_path}/frames", None, insecure=True)


def test_a_local_socket_in_a_folder_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open" / "own").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "own")
    (tmp_path / "open").chmod(0o777)

    for folder in ("open/own", "link"):
        with pytest.raises(UsageError, match="above it"):
            check_endpoint(f"ipc://{tmp_path}/{folder}/frames", None)
    (tmp_path / "open").chmod(0o1777)
    check_endpoint(f"ipc://{tmp_path}/open/own/frames", None)


def test_a_local_socket_in_another_user_s_folder_is_refused(tmp_path: Path) -> None:
    if not is_root():
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 65534, 65534)

    with pytest.raises(UsageError, match="folder of your own"):
        check_endpoint(f"ipc://{tmp_path}/frames", None)


def test_a_local_socket_in_no_folder_is_an_operation_error(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="make the folder"):
        check_endpoint(f"ipc://{tmp_path}/nowhere/frames", None)


def test_the_warning_about_missing_keys_names_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def source() -> None:
            check_endpoint("tcp://*:1", None, insecure=True)

        source()
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
