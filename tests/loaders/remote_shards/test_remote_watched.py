"""What a terminal shows of the downloads while a batch is waited for."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from support.faulty_proxy import Proxy
from support.terminal_screen import Terminal

PROGRAM = """
import sys
from shardprep.loaders import EvalTransform, Loader
from shardprep.loaders.measuring import watched

url, cache = sys.argv[1:]
with Loader(url, cache=cache, batch_size=10, shuffle=None, transform=EvalTransform(32), workers=0) as train:
    for _ in watched(train, title="train"):
        pass
    print("then", train.stats().storage.shards)
"""


@pytest.fixture
def released(proxy: Proxy) -> Iterator[threading.Event]:
    """An event before which no shard but the first is sent."""
    event = threading.Event()

    def wait(path: str, count: int) -> None:
        if "shard-" in path and "shard-00000" not in path:
            event.wait(60)

    proxy.fault = wait
    yield event
    event.set()


def test_downloads_are_shown_while_a_batch_waits_for_them(
    lmdb_shards: Path, bucket_url: str, released: threading.Event, tmp_path: Path
) -> None:
    count = len(read_manifest(lmdb_shards).shards)
    terminal = Terminal(PROGRAM, bucket_url, tmp_path / "cache", columns=100)
    terminal.until(rf"storage .* 1 of {count} shards begun, 0 ahead, \d+\.\d MB/s")
    waiting = terminal.screen.text
    released.set()
    code = terminal.end()

    assert "train:" in waiting
    assert (code, terminal.screen.text) == (0, f"then ShardLevels(total={count}, begun={count}, ahead=0)")


def test_the_first_batch_of_all_is_waited_for_with_its_downloads_shown(
    lmdb_shards: Path, bucket_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda path, count: "stall" if "shard-" in path else None
    terminal = Terminal(PROGRAM, bucket_url, tmp_path / "cache", columns=100)
    terminal.until(r"0%\|.*storage .* 0 of \d+ shards begun")
    terminal.process.kill()
    terminal.end()
