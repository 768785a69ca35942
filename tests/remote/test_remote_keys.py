"""Key files: their permissions, the refused ones, and that no key is ever shown."""

import os
import pickle
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.auth
from hypothesis import given, strategies as st

from shardprep.formats.errors import OperationError, ShardprepError, UsageError
from shardprep.loaders.machines.keys import (
    MAX_BYTES,
    fingerprint,
    load_allowed,
    load_public,
    load_secret,
    make_keys,
)
from support.datasets import is_root
from support.key_files import KeyFolder

OTHER_USER = 65534


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "data1").secret


@pytest.fixture
def public_file(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "data1").public


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


# Making keys


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_user_may_read_a_secret_key_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        pair = make_keys(tmp_path / "data1")
    finally:
        os.umask(before)

    assert stat.S_IMODE(pair.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(pair.public.stat().st_mode) == 0o644 & ~umask
    assert sorted(tmp_path.iterdir()) == sorted([pair.secret, pair.public])


@pytest.mark.slow
def test_a_secret_is_never_in_a_file_of_a_looser_mode(tmp_path: Path) -> None:
    opened: list[int] = []
    script = f"from shardprep.loaders.machines.keys import make_keys; make_keys({str(tmp_path / 'k')!r}, overwrite=True)"
    trace = ["strace", "-f", "-e", "trace=openat,open,creat,chmod,fchmod,fchmodat,rename,fsync"]
    try:
        done = subprocess.run(
            [*trace, sys.executable, "-c", script], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no strace")
    lines = [line for line in done.stderr.splitlines() if "k.key_secret" in line or "fsync" in line]

    created = [line for line in lines if "O_CREAT" in line]
    opened = [line.index("0600") for line in created]
    assert len(opened) == 1
    assert "O_EXCL" in created[0]
    assert not any("chmod" in line for line in lines)
    assert "fsync" in lines[lines.index(created[0]) + 1], "renamed before it is on disk"


def test_what_is_made_can_be_loaded_and_zeromq_s_own_tools_load_it_too(tmp_path: Path) -> None:
    pair = make_keys(tmp_path / "data1")
    secret = load_secret(pair.secret)

    assert load_public(pair.public) == secret.public
    assert zmq.auth.load_certificate(pair.secret) == (secret.public, secret.secret)
    assert zmq.auth.load_certificate(pair.public) == (secret.public, None)
    assert pair.fingerprint == fingerprint(secret.public)


def test_keys_that_zeromq_s_own_tools_made_can_be_loaded(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "data1", {"place": "here"})
    Path(secret).chmod(0o600)

    assert load_public(public) == load_secret(secret).public


@pytest.mark.parametrize("there", ["data1.key", "data1.key_secret"])
@pytest.mark.parametrize("as_link", [False, True])
def test_a_pair_that_is_there_is_kept(tmp_path: Path, there: str, as_link: bool) -> None:
    target = tmp_path / "precious" if as_link else tmp_path / there
    target.write_text("precious")
    if as_link:
        (tmp_path / there).symlink_to(target)

    with pytest.raises(UsageError, match="exists already"):
        make_keys(tmp_path / "data1")
    assert target.read_text() == "precious"


def test_a_dangling_link_in_the_secret_s_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "data1.key_secret").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(UsageError, match="exists already"):
        make_keys(tmp_path / "data1")
    assert not (tmp_path / "elsewhere").exists()


def test_overwriting_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "data1.key_secret").symlink_to(precious)

    pair = make_keys(tmp_path / "data1", overwrite=True)

    assert precious.read_text() == "precious"
    assert not pair.secret.is_symlink()
    assert load_secret(pair.secret).public == load_public(pair.public)


def test_overwriting_makes_another_pair_of_the_same_strictness(tmp_path: Path) -> None:
    first = make_keys(tmp_path / "data1")
    first.secret.chmod(0o666)
    (tmp_path / ".data1.key_secret.tmp").write_text("left by a killed process")

    second = make_keys(tmp_path / "data1", overwrite=True)

    assert second.fingerprint != first.fingerprint
    assert load_secret(second.secret).public == load_public(second.public)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "x.key", "x.key_secret", "folder/"])
def test_what_is_no_name_for_keys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a name"):
        make_keys(f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


# Loading keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666, 0o777])
def test_a_secret_that_others_can_get_at_is_refused_with_the_remedy(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)

    with pytest.raises(UsageError, match=f"chmod 600 {secret_file}"):
        load_secret(secret_file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_that_its_user_alone_can_get_at_is_read(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)

    assert load_secret(secret_file)


@pytest.mark.parametrize("load", [load_secret, load_public])
def test_another_user_s_file_is_refused(tmp_path: Path, load: Callable[[Path], object]) -> None:
    if not is_root():
        pytest.skip("only root can give a file away")
    pair = make_keys(tmp_path / "data1")
    file = pair.secret if load is load_secret else pair.public
    os.chown(file, OTHER_USER, OTHER_USER)

    with pytest.raises(UsageError, match=f"chown 0 {file}"):
        load(file)


def test_a_link_is_judged_by_the_file_it_leads_to(tmp_path: Path, secret_file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret_file)

    assert load_secret(link) == load_secret(secret_file)
    secret_file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        load_secret(link)


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "link to a folder"])
@pytest.mark.parametrize("load", [load_secret, load_public])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, load: Callable[[Path], object], kind: str
) -> None:
    place = tmp_path / "data1.key"
    if kind == "folder":
        place.mkdir(0o700)
    elif kind == "fifo":
        os.mkfifo(place, 0o600)
    else:
        place.symlink_to("/dev/null" if kind == "device" else tmp_path)

    with pytest.raises(UsageError, match="not a regular file"):
        load(place)


@pytest.mark.parametrize("load", [load_secret, load_public])
def test_a_missing_file_is_named(tmp_path: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(OperationError, match="prep keygen") as raised:
        load(tmp_path / "nowhere.key")
    assert raised.value.path == str(tmp_path / "nowhere.key")


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "no secret": lambda text: text.replace("secret-key", "other-key"),
    "no public": lambda text: text.replace("public-key", "other-key"),
    "too long a key": lambda text: text.replace('secret-key = "', 'secret-key = "x'),
    "everything twice": lambda text: text + text,
    "too large": lambda text: text + " " * MAX_BYTES,
    "keys that are no numbers": lambda text: re.sub('"[^"]*"', f'"{"#" * 40}"', text),
    "other letters": lambda text: text.replace('key = "', 'key = "\N{CROISSANT}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_secret_is_refused_and_named(secret_file: Path, damage: str) -> None:
    secret_file.write_text(DAMAGES[damage](secret_file.read_text()))

    with pytest.raises(UsageError) as raised:
        load_secret(secret_file)
    assert raised.value.path == str(secret_file)


def test_two_halves_of_different_pairs_are_refused(tmp_path: Path) -> None:
    first, second = make_keys(tmp_path / "first"), make_keys(tmp_path / "second")
    own, other = load_public(first.public).decode(), load_public(second.public).decode()
    first.secret.write_text(first.secret.read_text().replace(own, other))

    with pytest.raises(UsageError, match="not a pair"):
        load_secret(first.secret)


@given(st.binary(max_size=400))
def test_no_bytes_are_a_key_file_by_chance(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "random.key"
    file.write_bytes(data)
    file.chmod(0o600)

    for load in (load_secret, load_public):
        with pytest.raises(UsageError):
            load(file)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_public_key_that_others_may_replace_is_refused(public_file: Path, mode: int) -> None:
    public_file.chmod(mode)

    with pytest.raises(UsageError, match=f"chmod go-w {public_file}"):
        load_public(public_file)


def test_a_secret_key_in_the_allow_list_is_reported(keys: KeyFolder) -> None:
    (keys.folder / "stranger.key_secret").rename(keys.allowed / "stranger.key")

    with pytest.raises(UsageError, match="must not leave its machine"):
        load_allowed(keys.allowed)


# The allow-list


def test_the_allow_list_is_the_folder_s_public_keys_by_name(keys: KeyFolder) -> None:
    (keys.allowed / "notes.txt").write_text("not a key")
    (keys.allowed / ".#data3.key").write_text("an editor's")

    names = ["data1", "data2"]
    assert load_allowed(keys.allowed) == {load_public(keys.folder / f"{name}.key"): name for name in names}


def test_a_key_that_is_there_twice_has_the_first_name(keys: KeyFolder) -> None:
    (keys.allowed / "data1-copy.key").write_bytes((keys.folder / "data1.key").read_bytes())

    assert sorted(load_allowed(keys.allowed).values()) == ["data1-copy", "data2"]


def test_an_empty_allow_list_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    with pytest.raises(UsageError, match="no sender could connect"):
        load_allowed(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "data1.key"])
def test_an_allow_list_that_is_no_folder_is_named(keys: KeyFolder, name: str) -> None:
    with pytest.raises(OperationError, match="name the folder"):
        load_allowed(keys.folder / name)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_an_allow_list_into_which_others_can_put_keys_is_refused(keys: KeyFolder, mode: int) -> None:
    keys.allowed.chmod(mode)

    with pytest.raises(UsageError, match="chmod go-w"):
        load_allowed(keys.allowed)


def test_one_damaged_key_makes_the_list_unusable(keys: KeyFolder) -> None:
    (keys.allowed / "data2.key").write_text("curve")

    with pytest.raises(UsageError, match="data2"):
        load_allowed(keys.allowed)


# Keys are never shown


def test_no_key_is_in_a_repr_nor_in_an_error(keys: KeyFolder) -> None:
    file = keys.folder / "data1.key_secret"
    secret = load_secret(file)
    shown = [repr(secret), repr(keys.receiver), repr(keys.sender()), str(secret)]
    text = file.read_text()
    for damage in DAMAGES.values():
        file.write_text(damage(text))
        with pytest.raises(ShardprepError) as raised:
            load_secret(file)
        shown += [str(raised.value), repr(raised.value), repr(raised.value.__cause__)]

    assert not any(key.decode()[:8] in each for key in (secret.secret, secret.public) for each in shown)


def test_keys_travel_to_other_processes_as_paths(keys: KeyFolder) -> None:
    for each in (keys.receiver, keys.sender()):
        assert pickle.loads(pickle.dumps(each)) == each  # noqa: S301
        assert load_secret(each.secret).secret not in pickle.dumps(each)
