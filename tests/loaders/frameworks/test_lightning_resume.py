"""Lightning's checkpoints hold the loader's place in an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rank_programs import told_by

pytest.importorskip("lightning")

PROGRAM = """
import sys
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
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
        return to_torch(self.loader)

    def training_step(self, batch, _):
        self.numbers += batch[-1].tolist()
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_epoch_end(self):
        tell(self.numbers, self.loader)
        self.numbers = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(**checkpoint):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    kept = ModelCheckpoint(sys.argv[2], filename="{step}", every_n_train_steps=25, save_top_k=-1)
    trainer = lightning.Trainer(max_epochs=2, devices=1, accelerator="cpu", callbacks=[kept], **quiet)
    trainer.fit(Counting(sys.argv[1]), **checkpoint)

if __name__ == "__main__":
    fit()
    fit(ckpt_path=sys.argv[2] + "/step=25.ckpt")
"""


@pytest.mark.slow
def test_a_fit_from_a_checkpoint_within_an_epoch_gets_the_rest_of_it(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    _, (whole, receipt), (rest, receipt_of_rest) = told_by(
        tmp_path, PROGRAM, (lmdb_shards, tmp_path / "kept")
    )

    assert sorted(whole) == list(range(204))
    assert rest == whole[4 * 10 :]  # the epoch has 21 steps of 10
    assert receipt_of_rest == receipt
