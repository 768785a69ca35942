"""Executors that stand for engines and for other machines."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any


class Engine(Executor):
    """An executor of which ``run`` decides how a call ends."""

    def __init__(self, run: Callable[[Future[Any], Callable[[], Any]], None]) -> None:
        self._run = run
        self.submitted: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append(future)
        self._run(future, lambda: fn(*args, **kwargs))
        return future


def finish(future: Future[Any], call: Callable[[], Any]) -> None:
    """End a future as an executor does."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def elsewhere(change: Callable[[], Any], back: Callable[[], Any]) -> Engine:
    """An engine of which the workers' machine is this one after a change."""

    def run(future: Future[Any], call: Callable[[], Any]) -> None:
        change()
        finish(future, call)
        back()

    return Engine(run)


def moved(*moves: tuple[Path, Path]) -> Engine:
    """An engine of another machine, where each of these paths is found at the place beside it."""

    def change() -> None:
        for here, there in moves:
            here.rename(there)

    def back() -> None:
        for here, there in reversed(moves):
            there.rename(here)

    return elsewhere(change, back)
