"""Values for the callees of a block, through code that does not pass them on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which the variable has this value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
