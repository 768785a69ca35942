"""The sources of flows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from shardprep.loaders.flow.core.user_function import Function
from shardprep.loaders.flow.sources.dataset import FromDataset
from shardprep.loaders.flow.sources.fake import FromFakeData
from shardprep.loaders.flow.sources.files import FromFiles
from shardprep.loaders.flow.sources.parts import FromParts
from shardprep.loaders.order.epoch_order import Shuffle

from .pipeline import Pipeline
from .sources import python


class FlowSources(Pipeline):
    """The class methods of :class:`.Flow` that make a flow from a source."""

    @classmethod
    def from_iterable(cls, items: Iterable[Any]) -> Self:
        """A flow of the elements of ``items``, each once per pass.

        The items of a sequence (``len`` and ``[]``) can be picked and shuffled by number. Raises UsageError
        for an iterator, because it has only one pass: use :meth:`from_callable`.
        """
        return cls(python.from_iterable(items))

    @classmethod
    def from_callable(cls, begin: Callable[[], Iterable[Any]]) -> Self:
        """A flow of the items of ``begin()``, which is called for each pass. The length is unknown.

        ``begin`` returns an iterable; a generator function works. Raises UsageError for an object that cannot
        be called, and in a pass for a result without items.
        """
        return cls(python.FromCallable(Function(begin)))

    @classmethod
    def from_parts(cls, make: Callable[[int], Iterable[Any]], *, parts: int) -> Self:
        """A flow of one item of ``make(0)``, ..., ``make(parts - 1)`` each in turn, until all have ended.

        ``make(part)`` is called for each pass and returns an iterable of its own, such as a generator. A part
        that has ended is left out of the turn. If ``make`` returns a Flow, the part has that flow's pass of
        the same number, with random values of its own. All parts are open at the same time; ``parts`` is how
        many there are. The length is unknown.

        Several machines that :func:`.serve` this flow share the parts of a pass, and the order is the same:
        each part is made by one of them at a time. Steps after this one are made by one machine at a time, so
        what takes the time (``map``, ``batch``) belongs into ``make``. Raises UsageError for fewer than one
        part, and in a pass for a result without items.
        """
        return cls(FromParts(Function(make), parts))

    @classmethod
    def from_dataset(
        cls,
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        labels: str = "sorted_wnid0",
        with_keys: bool = False,
        columns: Sequence[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> Self:
        """A flow of the records of a converted dataset at ``path``: (image, label), encoded bytes and int.

        ``with_keys`` makes them (key, image, label). Of a dataset with columns, or with ``columns``, a dict
        takes the image's place, of the columns' values and "image". A dataset of saved items yields these,
        unless ``columns`` are named. ``path``, ``shuffle``, ``seed``, ``labels``, ``columns``, ``cache`` and
        ``cache_limit`` are as for :class:`.Loader`, but a shard is only downloaded when a record of it is
        read; pass n has the order of the loader's epoch n. A ``map`` with processes reads in its workers.
        Raises ManifestDamaged, UnknownVersion, UsageError, what :func:`.open_dataset` does for a URL, and
        OSError when the dataset is opened. A pass checks each record against its CRC-32C, and raises
        CorruptRecord and ShardDamaged.
        """
        source = FromDataset.of(
            path,
            shuffle=shuffle,
            seed=seed,
            label_space=labels,
            with_keys=with_keys,
            columns=columns,
            cache=cache,
            cache_limit=cache_limit,
        )
        return cls(source)

    @classmethod
    def from_files(
        cls, folder: str | os.PathLike[str], *, suffixes: Sequence[str] | None = None, seed: int | None = None
    ) -> Self:
        """A flow of the files in ``folder``/CLASS/... as (bytes, label).

        The label is the place of the class folder in sorted order. Files come in sorted order, or with
        ``seed`` in a new random order in each pass. Each file is read on its own, which is slower than
        shards. ``suffixes`` default to those of images. A ``map`` with processes reads in its workers. Raises
        UsageError for a folder without such files or with some outside of its class folders, and
        SourceDamaged for symbolic links in it.
        """
        return cls(FromFiles.of(folder, suffixes=suffixes, seed=seed))

    @classmethod
    def fake(
        cls,
        items: int,
        *,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
    ) -> Self:
        """A flow of ``items`` generated (image, label) pairs, without any file.

        An image is noise, uint8 [H, W, 3] with ``size`` (H, W); with ``encoded``, the bytes of a real JPEG
        file. Labels are ints. As in :class:`.FakeData`, images are read-only and repeat after a few different
        ones, and each takes ``seconds`` to make. ``seed`` selects the images and labels. Raises UsageError.
        """
        return cls(FromFakeData.of(items, size=size, encoded=encoded, seconds=seconds, seed=seed))
