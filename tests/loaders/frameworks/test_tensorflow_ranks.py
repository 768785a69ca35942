"""The rank of a loader under a strategy of TensorFlow over several machines, without TF_CONFIG."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rank_programs import assert_shared, free_address, told_by

pytest.importorskip("tensorflow")

UNDER_A_STRATEGY = """
import sys
from support.tf_devices import tf
from support.rank_programs import tell_epoch

path, *addresses, index = sys.argv[1:]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=int(index)
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
with strategy.scope():
    tell_epoch(path)
"""

ON_ONE_MACHINE = """
import sys
from support.tf_devices import tf
from support.rank_programs import tell_epoch

for strategy in (tf.distribute.MirroredStrategy(), tf.distribute.MultiWorkerMirroredStrategy()):
    with strategy.scope():
        tell_epoch(sys.argv[1])
"""


@pytest.mark.torture
def test_machines_of_a_current_strategy_share_the_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    addresses = free_address(), free_address()

    told = told_by(tmp_path, UNDER_A_STRATEGY, *((lmdb_shards, *addresses, rank) for rank in range(2)))

    assert_shared(told, ranks=2)


@pytest.mark.torture
def test_a_strategy_on_one_machine_reads_the_whole_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    told = told_by(tmp_path, ON_ONE_MACHINE, (lmdb_shards,))

    assert len(told) == 2
    for each in told:
        assert_shared([each], ranks=1)
