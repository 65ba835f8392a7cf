"""DFlash (arXiv 2602.06036): a block's tokens are drafted side by side, as a step of diffusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.draft.heads.block import BlockSpec


@dataclass(frozen=True)
class DFlash(BlockSpec):
    """A DFlash head."""

    kind = "dflash"
    weights = "dflash"
    examples: ClassVar[tuple[str, ...]] = ("dflash:{dflash}", "dflash:{dflash},nodes=12")
