"""Reports what each kernel call reads and computes to listeners such as the profiler's: unlike
torch's operators, kernel calls cannot be observed from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function


@dataclass(frozen=True)
class WeightRead:
    """A packed matrix that a product with ``rows`` rows reads once; ``key`` identifies it."""

    key: object
    elements: int
    bytes: int
    rows: int


@dataclass(frozen=True)
class NativeWork:
    """The work of one kernel call. ``cache_bytes``: keys and values that its attention reads."""

    products: tuple[WeightRead, ...]
    cache_bytes: int = 0
    attention_flops: int = 0


OPERATOR = "paceline_native::"  # prefix of the calls' names in profiler traces
WorkListener = Callable[[NativeWork], None]
_listeners: list[WorkListener] = []


@contextmanager
def counted(by: WorkListener) -> Iterator[None]:
    """Call ``by`` with the work of every kernel call within the context."""
    _listeners.append(by)
    try:
        yield
    finally:
        _listeners.remove(by)


def traced(name: str) -> AbstractContextManager[Any]:
    """A context that records a kernel call as an operator, if torch's profiler runs."""
    profiling = profiler._is_profiler_enabled
    return record_function(f"{OPERATOR}{name}") if profiling else nullcontext()


def report_work(work: Callable[[], Iterable[NativeWork]]) -> None:
    """Report the calls in ``work()`` to all listeners; without listeners it is not evaluated."""
    if _listeners:
        for call in work():
            for listener in _listeners:
                listener(call)
