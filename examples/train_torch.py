"""Train a small residual network with PyTorch, in one process or in several.

    python examples/train_torch.py            # on a miniature dataset
    python examples/train_torch.py DATASET    # a folder with train/ and val/, as `prep convert` makes it
    torchrun --nproc-per-node 2 examples/train_torch.py DATASET

With --checkpoints FOLDER it saves every few steps, also in the middle of an epoch, and continues from the
last of them: weights, optimizer and place in the data together.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sample_dataset import dataset_at
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardprep import EvalTransform, Loader, LocalShuffle, Receipt, TrainTransform, to_torch

SIZE = 64


class Residual(nn.Module):
    """Two convolutions beside a shortcut; half the height and width, ``made`` channels."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, made, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU(),
            nn.Conv2d(made, made, 3, padding=1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.shortcut = nn.Conv2d(given, made, 1, stride=2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class Network(nn.Sequential):
    """Logits of images, uint8 [B, H, W, 3]: normalised on the device, so that bytes are transferred."""

    def __init__(self, classes: int) -> None:
        stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, classes))
        super().__init__(stem, Residual(16, 32), Residual(32, 64), head)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.permute(0, 3, 1, 2)  # in the memory format channels_last, without a copy
        return super().forward(pixels.float() / 127.5 - 1)


def joined() -> torch.device:
    """Join the group of torchrun, or one of this process alone; return the device of this process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gathered(value: Any) -> list[Any]:
    """Return this value of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Training:
    """The model, its optimizer and the loaders; all that a checkpoint holds."""

    def __init__(self, train: Loader, val: Loader, device: torch.device) -> None:
        self.train, self.val, self.device = train, val, device
        network = Network(classes=len(train.dataset.manifest.labels)).to(device)
        self.network = network.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3)
        self.loss_of = nn.CrossEntropyLoss()
        self.steps = 0

    def batches(self, loader: Loader) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yield an epoch on the device; from pinned memory the copy runs beside the step before."""
        pinned = self.device.type == "cuda"
        for images, labels in DataLoader(to_torch(loader), batch_size=None, pin_memory=pinned):
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def autocast(self) -> torch.autocast:
        """Mixed precision where there is CUDA; bfloat16 needs no scaling of gradients."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def step(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        with self.autocast():
            loss = self.loss_of(model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    @torch.inference_mode()
    def validate(self) -> tuple[float, float]:
        """Return the mean loss and the accuracy over all ranks, each image counted once."""
        for buffer in self.network.buffers():  # each rank has batch statistics of its own
            dist.broadcast(buffer, src=0)
        self.network.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        # Not through DDP: its ranks would wait for each other, and one may have a batch less.
        for images, labels in self.batches(self.val):
            with self.autocast():
                logits = self.network(images)
            sums[0] += self.loss_of(logits.float(), labels) * len(labels)
            sums[1] += (logits.argmax(1) == labels).sum()
        self.network.train()
        dist.all_reduce(sums)
        count = len(self.val.records)
        Receipt.merge(gathered(self.val.receipt())).check(count)
        loss, accuracy = (sums / count).tolist()
        return loss, accuracy

    def save(self, folder: Path) -> None:
        """Save a checkpoint, after any step: the state of a loader is that of the last batch taken."""
        places = gathered(self.train.state_dict())  # each rank has its own
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            modules = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**modules, "steps": self.steps, "places": places}, folder / "unfinished")
            (folder / "unfinished").rename(folder / f"step{self.steps:08}.pt")  # all of it, or nothing

    def restore(self, folder: Path) -> None:
        """Continue from the last checkpoint, if there is one."""
        saved = sorted(folder.glob("step*.pt"))
        if not saved:
            return
        found = torch.load(saved[-1], map_location=self.device, weights_only=True)
        self.network.load_state_dict(found["network"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.steps, places = found["steps"], found["places"]
        same = len(places) == dist.get_world_size()  # if not, any rank's place is that of all
        self.train.load_state_dict(places[dist.get_rank() if same else 0])

    def run(self, *, epochs: int, checkpoints: Path | None, save_every: int) -> None:
        if checkpoints:
            self.restore(checkpoints)
        model = DistributedDataParallel(self.network)
        for epoch in range(self.train.epoch, epochs):
            for images, labels in self.batches(self.train):
                self.step(model, images, labels)
                if checkpoints and self.steps % save_every == 0:
                    self.save(checkpoints)
            loss, accuracy = self.validate()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: val loss {loss:.6f}, val accuracy {accuracy:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, nargs="?")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = parser.parse_args()
    device = joined()
    torch.manual_seed(0)
    train_transform, val_transform = TrainTransform(SIZE), EvalTransform(SIZE, resize=72)
    with (
        dataset_at(args.dataset) as path,
        Loader(
            path / "train", batch_size=32, transform=train_transform, shuffle=LocalShuffle("2GiB"), workers=2
        ) as train,
        Loader(path / "val", batch_size=32, transform=val_transform, workers=1, drop_last=False) as val,
    ):
        training = Training(train, val, device)
        training.run(epochs=args.epochs, checkpoints=args.checkpoints, save_every=args.save_every)
    dist.destroy_process_group()


if __name__ == "__main__":  # workers import this file if a transform is defined in it
    main()
