"""PyTorch's DataLoader on single files and on this package's shards, with the same decoder and transform."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from measuring.data import Data
from torch.utils.data import DataLoader, Dataset

from shardprep.formats import open_dataset
from shardprep.formats.records.record import Record
from shardprep.loaders import TrainTransform


@dataclass
class Files(Dataset[tuple[torch.Tensor, int]]):
    files: list[tuple[Path, int]]
    transform: TrainTransform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[number]
        record = Record(path.name, label, path.read_bytes())
        return torch.from_numpy(self.transform(record, _rng())), label


class Shards(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, path: Path, transform: TrainTransform) -> None:
        self.dataset = open_dataset(path)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        record = self.dataset[number]
        return torch.from_numpy(self.transform(record, _rng())), record.label


_generators: list[np.random.Generator] = []


def _rng() -> np.random.Generator:
    """One generator per process, seeded as torch seeds its workers."""
    if not _generators:
        _generators.append(np.random.default_rng(torch.initial_seed()))
    return _generators[0]


def files(data: Data) -> Iterator[int]:
    return _batches(Files(data.files(), TrainTransform(data.size)), data)


def shards(data: Data) -> Iterator[int]:
    return _batches(Shards(data.lmdb, TrainTransform(data.size)), data)


def _batches(dataset: Dataset[tuple[torch.Tensor, int]], data: Data) -> Iterator[int]:
    loader = DataLoader(
        dataset,
        batch_size=data.batch,
        shuffle=True,
        num_workers=data.workers,
        drop_last=True,
        persistent_workers=True,
        worker_init_fn=_one_thread,
    )
    while True:
        for images, _ in loader:
            yield len(images)


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
