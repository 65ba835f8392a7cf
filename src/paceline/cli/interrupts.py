"""Ctrl-C in long runs: stop where the state is whole."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Ctrl-C between steps, where weights and optimizer agree; a second one stops at once."""

    def __init__(self) -> None:
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt("interrupted; the last saved checkpoint stands")
        self.pending = True
        print("stopping after this step (Ctrl-C again: at once)", file=sys.stderr)


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Note Ctrl-C instead of raising; the block asks ``pending`` when it can stop."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
