"""Whatever ends the work, the same command goes on, and its end is the published dataset and nothing else."""

import random
import shutil
from pathlib import Path

import pytest

from support.datasets import prep, tree
from support.faulty_proxy import Proxy
from support.sampling import torture_except
from support.scripts import killed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kills", torture_except([1, 3, 15], 1))
def test_a_publishing_killed_at_random_moments_ends_with_the_same_bytes(
    local: Path, bucket: Path, url: str, proxy: Proxy, kills: int
) -> None:
    faults, chosen = ["slow", "slow", "cut", "503", "flip"], random.Random(0)
    for _ in range(kills):
        proxy.sending = lambda path, count: chosen.choice(faults[: 3 if path.endswith(".json") else 5])
        killed(chosen.uniform(0.5, 2.0), "publish", local, url)
        for manifest in bucket.rglob("manifest.json"):
            there, wanted = tree(manifest.parent), tree(local / manifest.parent.name)
            assert there["manifest.json"] != wanted["manifest.json"] or there.items() >= wanted.items()
        if tree(bucket) == tree(local):
            shutil.rmtree(bucket)

    proxy.sending = lambda path, count: None
    prep("publish", local, url, check=True)
    assert tree(bucket) == tree(local)
