"""Whatever ends a fetch, the same command goes on, and its end is the published dataset and nothing else."""

import random
import re
import shutil
from pathlib import Path

import pytest

from support.datasets import prep, tree
from support.faulty_proxy import Proxy
from support.sampling import torture_except
from support.scripts import interrupted, killed

pytestmark = pytest.mark.slow


def test_ctrl_c_ends_it_at_once_and_says_what_is_kept(bucket: Path, proxy: Proxy, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    proxy.fault = lambda path, count: "stall" if path.endswith("shard-00003.h5") else None
    words = ("fetch", "s3://bucket/shards/train", copy, "--timeout", 3600, "--quiet")

    # eight are transferred at a time: when a ninth is there, one is done
    code, _, complained = interrupted(*words, when=lambda: len([*copy.glob("shard-*")]) > 8)
    assert code == 130
    assert re.fullmatch(
        r"prep: interrupted; \d+ of \d+ files are fetched and intact; run it again to continue\n", complained
    )
    assert not [path for path in (copy / ".prep").iterdir() if path.name.startswith("run-")]
    assert "manifest.json" not in tree(copy)
    proxy.fault = lambda path, count: None
    prep("fetch", "s3://bucket/shards/train", copy, check=True)
    assert tree(copy) == tree(bucket / "shards/train")


SPOILT = (".lmdb", ".h5", ".npy")
RUNS = [("shards", 2), ("shards", 5), ("shards", 30), ("lmdb", 30), ("columns", 30)]


@pytest.mark.parametrize(("url", "kills"), torture_except(RUNS, ("shards", 2)))
def test_killed_at_random_moments_it_finishes_with_the_same_bytes(
    bucket: Path, proxy: Proxy, tmp_path: Path, url: str, kills: int
) -> None:
    copy, faults, chosen = tmp_path / "copy", ["slow", "slow", "cut", "flip", "long", "503"], random.Random(0)
    for _ in range(kills):
        proxy.fault = lambda path, count: chosen.choice(faults) if path.endswith(SPOILT) else None
        killed(chosen.uniform(0.25, 1.2), "fetch", f"s3://bucket/{url}", copy)
        for manifest in copy.rglob("manifest.json"):
            published = tree(bucket / url / manifest.parent.relative_to(copy))
            assert tree(manifest.parent).items() >= published.items()
        if not list(copy.rglob(".prep")) and tree(copy) == tree(bucket / url):
            shutil.rmtree(copy)

    proxy.fault = lambda path, count: None
    prep("fetch", f"s3://bucket/{url}", copy, check=True)
    assert tree(copy) == tree(bucket / url)
    assert not list(copy.rglob(".prep"))
    prep("verify", copy, check=True)
