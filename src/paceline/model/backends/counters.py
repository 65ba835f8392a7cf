"""What a call of the kernels reads and computes, for listeners that count work: unlike operators of
torch it cannot be watched from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function


@dataclass(frozen=True)
class WeightRead:
    """A packed matrix that ``rows`` rows were multiplied with, read once."""

    key: object
    elements: int
    bytes: int
    rows: int


@dataclass(frozen=True)
class NativeWork:
    """One call: its products, and bytes of keys and values that its attention read."""

    products: tuple[WeightRead, ...]
    cache_bytes: int = 0
    attention_flops: int = 0


OPERATOR = "paceline_native::"  # and its name, in traces
WorkListener = Callable[[NativeWork], None]
_listeners: list[WorkListener] = []


@contextmanager
def counted(by: WorkListener) -> Iterator[None]:
    """Call ``by`` with every call of the kernels in the block."""
    _listeners.append(by)
    try:
        yield
    finally:
        _listeners.remove(by)


def traced(name: str) -> AbstractContextManager[Any]:
    """Record a call as an operator of torch's profiler."""
    recorded = profiler._is_profiler_enabled
    return record_function(f"{OPERATOR}{name}") if recorded else nullcontext()


def count_work(work: Callable[[], Iterable[NativeWork]]) -> None:
    """Report calls; ``work`` is called only if there are listeners."""
    if _listeners:
        for done in work():
            for listener in _listeners:
                listener(done)
