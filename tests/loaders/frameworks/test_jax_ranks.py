"""The rank of a loader where jax.distributed is initialised, without environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rank_programs import assert_shared, free_address, told_by

pytest.importorskip("jax")

INITIALISED = """
import sys
import jax
from support.rank_programs import tell_epoch

path, address, rank = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
tell_epoch(path)
"""


@pytest.mark.slow
def test_processes_of_jax_share_the_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    address = free_address()

    told = told_by(
        tmp_path, INITIALISED, *((lmdb_shards, address, rank) for rank in range(2)), JAX_PLATFORMS="cpu"
    )

    assert_shared(told, ranks=2)
