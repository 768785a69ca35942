"""The rank of a loader in the processes that Lightning starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rank_programs import assert_shared, told_by

pytest.importorskip("lightning")

PROGRAM = """
import sys
import lightning, torch
from support.loaded import loader_on
from support.rank_programs import tell
from shardprep.loaders.torch_data import to_torch

class Counting(lightning.LightningModule):
    def __init__(self, path):
        super().__init__()
        self.path = path
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self):
        self.loader = loader_on(self.path)
        self.numbers = []
        return torch.utils.data.DataLoader(to_torch(self.loader), batch_size=None)

    def training_step(self, batch, _):
        self.numbers += batch[-1].tolist()
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_epoch_end(self):
        tell(self.numbers, self.loader)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=1, devices=2, strategy="ddp", accelerator="cpu", **quiet)
    trainer.fit(Counting(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_processes_of_lightning_share_the_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    told = told_by(tmp_path, PROGRAM, (lmdb_shards,))

    assert_shared(told, ranks=2)
