"""The items of a flow's first pass by number, for :func:`.write_dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from shardprep.formats.conversion.writing.numbered_items import NumberedItems
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.flow.core.pass_context import PassContext, PassResources
from shardprep.loaders.flow.map.components import MapComponent
from shardprep.loaders.flow.map.map import Map, Mapped
from shardprep.loaders.flow.map.process_map import ProcessMap
from shardprep.loaders.flow.map.thread_map import ThreadMap
from shardprep.loaders.flow.steps.in_process import InProcess


@dataclass(frozen=True)
class FlowItems(NumberedItems):
    """The items of pass 0 of ``node``, which can pick. ``kept`` are its flow's resources, None elsewhere."""

    node: Node
    kept: PassResources | None = None

    def __len__(self) -> int:
        return self.node.length.items

    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        return self.node.pick(PassContext(0, self.kept or PassResources()), numbers)

    def elsewhere(self) -> NumberedItems | None:
        node = _alone(self.node)
        return None if _has_processes(node) else FlowItems(node)


def _alone(node: Node) -> Node:
    """Return the node without threads and processes of maps at its end; its items are the same.

    The writing workers each make whole items, so that a map needs no processes of its own. Declared outputs
    are kept, because they may change the dtype of a result.
    """
    if isinstance(node, ThreadMap) or (isinstance(node, ProcessMap) and node.outputs is None):
        mapped = cast("Mapped", node)
        return Map(
            _alone(mapped.source),
            mapped.function,
            drop_none=mapped.drop_none,
            random=mapped.random,
            seed=mapped.seed,
        )
    if isinstance(node, Map | MapComponent):
        return replace(node, source=_alone(node.source))
    return node


def _has_processes(node: Node) -> bool:
    return isinstance(node, ProcessMap | InProcess) or any(map(_has_processes, node.sources))
