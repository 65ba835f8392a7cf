"""Spec strings for drafters, and sizes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paceline.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes in ``512M``, ``1.5GiB``, ``2 GB`` (all powers of 1024) or a plain number.

    Raises ConfigError.
    """
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        size = int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size; write 512M or 2G") from None
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size above 0")
    return size


@dataclass(frozen=True)
class DraftSpec:
    """``KIND[:ARGUMENT][,KEY=VALUE...]``, for example ``ngram:min=2,max=4`` or
    ``tree:path/to/draft,branching=2x2x1``; a hybrid's argument is ``SPEC+SPEC...``. Anything whose
    first word is not a known kind is a model path: ``DraftSpec("model", path)``."""

    kind: str
    argument: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None, kinds: tuple[str, ...]) -> DraftSpec:
        """Raises ConfigError on an option that is not KEY=VALUE."""
        if text is None or text == "none":
            return cls("none")
        head, _, rest = text.partition(":")
        if head not in kinds:
            return cls("model", text)
        if head == "hybrid":
            return cls(head, rest)
        argument: str | None = None
        options: dict[str, str] = {}
        for position, part in enumerate(part for part in rest.split(",") if part):
            key, equals, value = part.partition("=")
            if equals:
                options[key.strip()] = value.strip()
            elif position == 0:
                argument = part
            else:
                raise ConfigError(f"draft {text!r}: {part!r} is not KEY=VALUE")
        return cls(head, argument, options)

    def members(self, kinds: tuple[str, ...]) -> list[DraftSpec]:
        """The specs that a hybrid's argument joins with ``+``. Raises ConfigError.

        A ``+`` parts members only before a known kind, so that paths may contain it.
        """
        usable = [kind for kind in kinds if kind not in ("none", "hybrid")]
        first = "|".join(map(re.escape, usable))
        parts = re.split(rf"\+(?=(?:{first})(?:[:+]|$))", self.argument or "")
        found = [DraftSpec.parse(part, kinds) for part in parts]
        for part, spec in zip(parts, found, strict=True):
            if part.partition(":")[0] not in usable:
                raise ConfigError(
                    f"draft 'hybrid': member {part!r} begins with no known kind; join members "
                    f"with +, as in hybrid:ngram+model:PATH (kinds: {', '.join(usable)})"
                )
            assert spec.kind in usable
        return found

    def check_options(self, known: tuple[str, ...]) -> None:
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            offered = ", ".join(known) or "none"
            raise ConfigError(
                f"draft {self.kind!r} has no option {', '.join(unknown)}; it knows: {offered}"
            )

    def integer(self, key: str, default: int) -> int:
        value = self.options.get(key)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise ConfigError(
                f"draft {self.kind!r}: {key}={value!r} is not a whole number"
            ) from None

    def number(self, key: str, default: float) -> float:
        value = self.options.get(key)
        if value is None:
            return default
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"draft {self.kind!r}: {key}={value!r} is not a number") from None

    def branching(self, key: str = "branching") -> tuple[int, ...] | None:
        """``2x2x1``: children per node, level by level."""
        value = self.options.get(key)
        if value is None:
            return None
        try:
            factors = tuple(int(part) for part in value.split("x"))
        except ValueError:
            factors = ()
        if not factors or min(factors) < 1:
            raise ConfigError(
                f"draft {self.kind!r}: {key}={value!r} is not like 2x2x1 (children per level)"
            )
        return factors
