"""The record of ``hybrid``: several drafters joined into one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.draft.spec import DraftSpec, Loading, NoDraft, Prepared
from paceline.errors import ConfigError
from paceline.pace.hybrid import HybridDrafter


@dataclass(frozen=True, init=False)
class Hybrid(DraftSpec):
    """Drafters that take turns, as in ``Hybrid(NGram(min=2), Eagle3(path))``; in a spec they are
    joined by ``+``. The order decides between equals."""

    kind = "hybrid"
    page = "hybrid.md"
    natural_length = 8
    examples = (
        "hybrid:ngram:max=3+model:{draft}",
        "hybrid:suffix+ngram+medusa:{medusa}+eagle3:{eagle3}+tree:{draft}",
    )

    parts: tuple[DraftSpec, ...]

    def __init__(self, *parts: DraftSpec) -> None:
        if not parts or any(isinstance(part, (NoDraft, Hybrid)) for part in parts):
            raise ConfigError("draft 'hybrid': join drafters that propose something by themselves")
        object.__setattr__(self, "parts", parts)

    def members(self) -> tuple[DraftSpec, ...]:
        return self.parts

    def prepare(self, loading: Loading) -> Prepared:
        members = [part.prepare(loading) for part in self.parts]
        return Prepared(
            lambda context: HybridDrafter(
                [m.build(context) for m in members], context.cache.device
            ),
            sum(member.cache_bytes for member in members),
            feature_bytes=sum(member.feature_bytes for member in members),
        )

    def variants(self) -> dict[str, Hybrid]:
        return {"": self}

    @classmethod
    def read(cls, rest: str, kinds: Mapping[str, type[DraftSpec]]) -> Hybrid:
        """A ``+`` parts members only before a known kind, so that paths may contain it."""
        usable = [kind for kind in kinds if kind not in (NoDraft.kind, cls.kind)]
        parts = re.split(rf"\+(?=(?:{'|'.join(map(re.escape, usable))})(?:[:+]|$))", rest)
        for part in parts:
            if part.partition(":")[0] not in usable:
                raise ConfigError(
                    f"draft 'hybrid': member {part!r} begins with no known kind; join members "
                    f"with +, as in hybrid:ngram+model:PATH (kinds: {', '.join(usable)})"
                )
        words = (part.partition(":") for part in parts)
        return cls(*(kinds[kind].read(own, kinds) for kind, _, own in words))

    def argument(self) -> str:
        return "+".join(map(str, self.parts))
