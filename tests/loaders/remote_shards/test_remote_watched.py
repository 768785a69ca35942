"""What a terminal shows of the downloads while a batch is waited for."""

from pathlib import Path

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


def test_the_first_batch_of_all_is_waited_for_with_its_downloads_shown(
    lmdb_shards: Path, bucket_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda path, count: "stall" if "shard-" in path else None
    terminal = Terminal(PROGRAM, bucket_url, tmp_path / "cache", columns=100)
    terminal.until(r"0%\|.*storage .* 0 of \d+ shards begun")
    terminal.process.kill()
    terminal.end()
