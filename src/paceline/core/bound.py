"""Context variables for a block: values for functions that are called without such an argument."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable within a ``with`` block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
