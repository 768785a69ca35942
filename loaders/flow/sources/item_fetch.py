"""Reads saved items by their keys, in the form in which they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.columns.open_columns import OpenColumns
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.shard_cache import OpenShards
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import ManifestDamaged

from .flow_files import FlowFiles

ItemKey = tuple[int, int, int, bytes, int, int]  # number, shard, ordinal; key, label, CRC-32C from the index


@dataclass(frozen=True)
class ItemFetch:
    """Reads items of ``form``: their ``columns``, and their images where they have one.

    ``labels`` has what a stored label was given as: a number or a name; the last is that of -1.
    """

    folder: Path
    container: str
    shards: tuple[FileEntry, ...]
    columns: tuple[ColumnEntry, ...]
    files: FlowFiles
    form: ItemForm
    labels: tuple[Any, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> ItemFetch:
        """Return the reader of a dataset of items. Raises ManifestDamaged if form and columns differ."""
        manifest = dataset.manifest
        form = ItemForm.of_manifest(manifest.source)
        if form is None or form.columns != manifest.schema.names:
            raise ManifestDamaged("says of its items what its columns do not have", path=dataset.path)
        columns = manifest.columns.entries if manifest.columns else ()
        labels = (*_labels(form, dataset.classes), -1)
        files = FlowFiles.of(dataset)
        return cls(dataset.path, manifest.container, manifest.shards, columns, files, form, labels)

    @contextmanager
    def open(self) -> Iterator[Callable[[ItemKey], Any]]:
        with (
            self.files.open() as bring,
            closing(OpenShards(self.folder, self.container, self.shards, bring)) as shards,
            closing(OpenColumns(self.folder, self.columns, self.container, bring=bring)) as columns,
        ):
            read = [columns[name].value for name in columns.names]
            yield partial(self._item, shards if "image" in self.form.own else None, read)

    def _item(
        self, shards: OpenShards | None, read: Sequence[Callable[[RecordPlace], Any]], key: ItemKey
    ) -> Any:
        number, shard, ordinal, name, label, _ = key
        image = b"" if shards is None else shards[shard].read(ordinal, indexed=key[3:]).image
        place = RecordPlace(number, shard, ordinal, name)
        values = [value(place) for value in read]
        return self.form.item(name.decode(), self.labels[label], image, values)


def _labels(form: ItemForm, classes: tuple[str, ...]) -> tuple[Any, ...]:
    if form.is_named:
        return classes
    number_of = {name: number for number, name in enumerate(form.classes)}
    return tuple(number_of.get(name, place) for place, name in enumerate(classes))
