"""Sizes as people write them."""

from __future__ import annotations

from paceline.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes in ``512M``, ``1.5GiB``, ``2 GB`` (all powers of 1024) or a plain number. Raises
    ConfigError."""
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        size = int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size; write 512M or 2G") from None
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size above 0")
    return size
