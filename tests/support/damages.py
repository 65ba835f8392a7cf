"""Files that were cut off, or had a bit flipped."""

from __future__ import annotations

import random


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damages(content: bytes, seed: int, cuts: int, flips: int) -> list[bytes]:
    """Cut off anywhere, and one bit flipped anywhere; the same ones for the same seed."""
    chooser = random.Random(seed)
    cut = [content[: chooser.randrange(len(content))] for _ in range(cuts)]
    return [
        b"",
        *cut,
        *(flipped(content, chooser.randrange(8 * len(content))) for _ in range(flips)),
    ]
