"""The rank of a loader where a framework has started the processes, or initialised a group of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardprep import UsageError
from support.loaded import epoch_of, loader_on
from support.rank_programs import assert_shared, free_address, told_by
from support.sampling import torture_except

JAX = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from support.loaded import loader_on
from support.rank_programs import tell
from shardprep import to_jax

path, address, rank = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
rows = jax.sharding.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.sharding.PartitionSpec("rows"))
with loader_on(path, batch_size=6) as loader:  # 17 batches in each process
    batches = [batch[-1] for batch in to_jax(loader, device=rows)]
    assert {batch.shape for batch in batches} == {(12,)}
    tell([int(n) for batch in batches for n in batch.addressable_data(0)], loader)
"""

SPAWNED_BY_TORCH = """
import sys
import torch.distributed
import torch.multiprocessing
from support.rank_programs import tell_epoch

def train(rank, path, meeting):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    tell_epoch(path)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, sys.argv[1:], nprocs=2)
"""

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


LIGHTNING = """
import sys
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.loaded import loader_on
from support.rank_programs import tell
from shardprep.loaders.torch_data import to_torch

class Counting(lightning.LightningModule):
    def __init__(self, path, wrap=lambda batches: batches):
        super().__init__()
        self.path, self.wrap = path, wrap
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self):
        self.loader = loader_on(self.path)
        self.numbers = []
        return self.wrap(to_torch(self.loader))

    def on_train_epoch_start(self):
        if self.loader.epoch < self.current_epoch:
            self.loader.set_epoch(self.current_epoch)

    def training_step(self, batch, _):
        self.numbers += batch[-1].tolist()
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_epoch_end(self):
        tell(self.numbers, self.loader)
        self.numbers = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
"""

TWO_RANKS = """
if __name__ == "__main__":
    trainer = lightning.Trainer(max_epochs=1, devices=2, strategy="ddp", enable_checkpointing=False, **quiet)
    trainer.fit(Counting(sys.argv[1], lambda it: torch.utils.data.DataLoader(it, batch_size=None)))
"""

FROM_A_CHECKPOINT = """
def fit(**checkpoint):
    often = {"every_n_train_steps": 25}, {"every_n_epochs": 1}
    kept = [ModelCheckpoint(sys.argv[2], filename="{step}", save_top_k=-1, **each) for each in often]
    trainer = lightning.Trainer(max_epochs=2, devices=1, callbacks=kept, **quiet)
    trainer.fit(Counting(sys.argv[1]), **checkpoint)

if __name__ == "__main__":
    fit()
    for step in (25, 21):
        fit(ckpt_path=f"{sys.argv[2]}/step={step}.ckpt")
"""


def two_of(*addresses: str) -> list[tuple[object, ...]]:
    """The arguments of two processes, which meet at these addresses."""
    return [(*addresses, rank) for rank in range(2)]


SHARING: dict[str, tuple[str, Callable[[Path], list[tuple[object, ...]]]]] = {
    "jax": (JAX, lambda folder: two_of(free_address())),
    "torch": (SPAWNED_BY_TORCH, lambda folder: [(folder / "meeting",)]),
    "lightning": (LIGHTNING + TWO_RANKS, lambda folder: [()]),
    "tensorflow": (UNDER_A_STRATEGY, lambda folder: two_of(free_address(), free_address())),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", torture_except(SHARING, "jax", "torch", "lightning"))
def test_processes_of_a_framework_share_the_epoch(framework: str, lmdb_shards: Path, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    program, arguments = SHARING[framework]

    told = told_by(tmp_path, program, *((lmdb_shards, *each) for each in arguments(tmp_path)))

    assert_shared(told, ranks=2)


@pytest.mark.torture
def test_a_strategy_on_one_machine_reads_the_whole_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    told = told_by(tmp_path, ON_ONE_MACHINE, (lmdb_shards,))

    assert len(told) == 2
    for each in told:
        assert_shared([each], ranks=1)


@pytest.mark.slow
def test_a_fit_goes_on_within_an_epoch_or_with_the_next(lmdb_shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    _, (whole, receipt), (rest, receipt_of_rest), (following, _) = told_by(
        tmp_path, LIGHTNING + FROM_A_CHECKPOINT, (lmdb_shards, tmp_path / "kept")
    )

    assert sorted(whole) == list(range(204))
    assert (rest, following) == (whole[4 * 10 :], whole)  # the epoch has 21 steps of 10
    assert receipt_of_rest == receipt


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only one of a group of PyTorch."""
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_group_that_is_initialised_after_the_loader_is_an_error_where_it_has_another_rank(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("torch")
    with loader_on(lmdb_shards) as good, loader_on(lmdb_shards, rank=1, world_size=2) as given:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with loader_on(lmdb_shards) as other:
            request.getfixturevalue("alone")
            assert len(epoch_of(good)) == 21
            assert len(epoch_of(given)) == 11
            with pytest.raises(
                UsageError, match=r"rank 0 of 1 .*, but rank 1 of 2 .* the Loader.*train_dataloader"
            ):
                iter(other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("module", ["torch", "torchdata"])
def test_accelerate_cannot_divide_the_batches_of_a_rank_again(lmdb_shards: Path, module: str) -> None:
    accelerate, _ = pytest.importorskip("accelerate"), pytest.importorskip(module)
    how = accelerate.DataLoaderConfiguration(use_stateful_dataloader=module == "torchdata")
    prepare = accelerate.Accelerator(cpu=True, dataloader_config=how).prepare
    from torch.utils.data import DataLoader

    from shardprep import to_torch

    with loader_on(lmdb_shards) as whole, loader_on(lmdb_shards, rank=0, world_size=2) as half:
        assert len(list(prepare(DataLoader(to_torch(whole), batch_size=None)))) == 21
        with pytest.raises(UsageError, match=r"do not give the DataLoader to accelerator\.prepare"):
            next(iter(prepare(DataLoader(to_torch(half), batch_size=None))))
