"""The writer of a shard of which only the rows are wanted."""

from __future__ import annotations

from shardprep.formats.containers.container import ShardWriter, Stored


class DiscardingWriter(ShardWriter):
    """Writes nothing."""

    def append(self, stored: Stored, offset: int = 0) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass
