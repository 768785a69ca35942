"""Key files: their permissions, the refused ones, that no key is ever shown; and what needs keys."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.user_paths import MAX_KEY_FILE_BYTES
from shardprep.loaders.machines.keys import (
    PlaintextWire,
    check_endpoint,
    load_allowed,
    load_public,
    load_secret,
    make_keys,
)
from support.datasets import is_root
from support.key_files import KeyFolder
from support.sampling import needs_strace

OTHER_USER = 65534


# Making keys


@pytest.mark.slow
@needs_strace
def test_a_secret_is_never_in_a_file_of_a_looser_mode(tmp_path: Path) -> None:
    script = f"from shardprep.loaders.machines.keys import make_keys; make_keys({str(tmp_path / 'k')!r}, overwrite=True)"
    trace = ["strace", "-f", "-e", "trace=openat,open,creat,chmod,fchmod,fchmodat,rename,fsync"]
    done = subprocess.run([*trace, sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if f"{tmp_path}/" in line or "fsync" in line]

    renamed = next(number for number, line in enumerate(lines) if "k.key_secret" in line)
    created, flushed = lines[renamed - 2 : renamed]
    assert created.split('"')[1] == lines[renamed].split('"')[1]
    assert "O_EXCL" in created
    assert "0600" in created
    assert not any("chmod" in line for line in lines)
    assert "fsync" in flushed, "renamed before it is on disk"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "x.key", "x.key_secret", "folder/"])
def test_what_is_no_name_for_keys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a name"):
        make_keys(f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


# Loading keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_secret_that_others_can_get_at_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = make_keys(tmp_path / "data1").secret
    file.chmod(mode)

    with pytest.raises(UsageError, match=f"chmod 600 {file}"):
        load_secret(file)


@pytest.mark.parametrize("load", [load_secret, load_public])
def test_what_is_no_file_or_another_user_s_is_refused_at_once_and_named(
    tmp_path: Path, load: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("", "fifo", "device", "link"):
        with pytest.raises(UsageError, match="not a regular file"):
            load(tmp_path / name)
    with pytest.raises(OperationError, match="prep keygen") as raised:
        load(tmp_path / "nowhere.key")
    assert raised.value.path == str(tmp_path / "nowhere.key")
    if is_root():  # only root can give a file away
        pair = make_keys(tmp_path / "data1")
        file = pair.secret if load is load_secret else pair.public
        os.chown(file, OTHER_USER, OTHER_USER)
        with pytest.raises(UsageError, match=f"chown 0 {file}"):
            load(file)


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "no secret": lambda text: text.replace("secret-key", "other-key"),
    "no public": lambda text: text.replace("public-key", "other-key"),
    "too long a key": lambda text: text.replace('secret-key = "', 'secret-key = "x'),
    "everything twice": lambda text: text + text,
    "too large": lambda text: text + " " * MAX_KEY_FILE_BYTES,
    "keys that are no numbers": lambda text: re.sub('"[^"]*"', f'"{"#" * 40}"', text),
    "other letters": lambda text: text.replace('key = "', 'key = "\N{CROISSANT}'),
}


# The allow-list


def test_an_allow_list_that_cannot_be_trusted_is_an_error(keys: KeyFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(0o700)
    with pytest.raises(UsageError, match="no sender could connect"):
        load_allowed(tmp_path / "empty")
    for name in ("nowhere", "data1.key"):
        with pytest.raises(OperationError, match="name the folder"):
            load_allowed(keys.folder / name)
    for mode in (0o770, 0o707, 0o1777):
        keys.allowed.chmod(mode)
        with pytest.raises(UsageError, match="chmod go-w"):
            load_allowed(keys.allowed)
    keys.allowed.chmod(0o700)
    (keys.folder / "stranger.key_secret").rename(keys.allowed / "stranger.key")
    with pytest.raises(UsageError, match="must not leave its machine"):
        load_allowed(keys.allowed)


# Keys are never shown


def test_a_damaged_secret_is_named_and_no_key_is_in_a_repr_nor_in_an_error(keys: KeyFolder) -> None:
    file = keys.folder / "data1.key_secret"
    secret = load_secret(file)
    shown = [repr(secret), repr(keys.receiver), repr(keys.sender()), str(secret)]
    text = file.read_text()
    for damage in DAMAGES.values():
        file.write_text(damage(text))
        with pytest.raises(UsageError) as raised:
            load_secret(file)
        assert raised.value.path == str(file)
        shown += [str(raised.value), repr(raised.value), repr(raised.value.__cause__)]

    assert not any(key.decode()[:8] in each for key in (secret.secret, secret.public) for each in shown)


# Endpoints


EXPOSED = [
    *(f"tcp://{host}:5555" for host in ("*", "0.0.0.0", "10.0.0.1", "eth0", "lo", "training", "[::]")),  # noqa: S104
    *(f"tcp://{host}:5555" for host in ("localhost.example.org", "127.0.0.1.example.org")),
    *(f"tcp://{host}:5555" for host in ("127.0.0.1:0;10.0.0.1", "localhost:0;10.0.0.1", "[::ffff:10.0.0.1]")),
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
    "endpoint",
    ["inproc://here", "127.0.0.1:5555", "tcp://5555", "tcp://", "tcp://::1:5555", "ipc://@x", "ipc://*"],
)
def test_an_endpoint_that_cannot_be_secured_is_refused_even_with_keys(endpoint: str, keys: KeyFolder) -> None:
    for given, insecure in itertools.product((None, keys.receiver), (False, True)):
        with pytest.raises(UsageError):
            check_endpoint(endpoint, given, insecure=insecure)


def test_a_local_socket_in_another_user_s_folder_or_in_none_is_refused(tmp_path: Path) -> None:
    if not is_root():
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 65534, 65534)

    with pytest.raises(UsageError, match="folder of your own"):
        check_endpoint(f"ipc://{tmp_path}/frames", None)
    with pytest.raises(OperationError, match="make the folder"):
        check_endpoint(f"ipc://{tmp_path}/nowhere/frames", None)
