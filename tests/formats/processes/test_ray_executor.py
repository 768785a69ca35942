"""A call on a cluster that is gone is an error, whenever it was made."""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from shardprep.formats.runtime import executors as ray_executor
from shardprep.formats.runtime.executors import RayExecutor


def test_a_call_that_is_made_while_the_head_is_declared_silent_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "HEAD_INTERVAL_S", 0.01)
    monkeypatch.setattr(ray_executor, "HEAD_SILENT_S", -1.0)

    def sent(*_: object) -> object:
        executor._watch("127.0.0.1:1")  # which ends here, before the call is known
        return SimpleNamespace(future=Future)

    def remote(**_: object) -> Callable[[object], object]:
        return lambda call: SimpleNamespace(remote=sent)

    connected = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True)))
    ray: Any = SimpleNamespace(util=connected, is_initialized=lambda: True, remote=remote)
    monkeypatch.setitem(sys.modules, "ray", ray)
    executor = RayExecutor()

    with pytest.raises(ConnectionError, match="does not answer"):
        executor.submit(int, "7").result(10)
