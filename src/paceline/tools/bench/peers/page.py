"""What could not be made equal, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.tools.bench.peers.kinds import ASPECTS
from paceline.tools.report.document import Table

_NOTE = (
    "Other engines get the prompts as the target's template renders them, and are asked for as "
    "many tokens. cache: of prompts. Their speedup is over our plain decoding, and a text of "
    "theirs that parts from it is no bug of ours."
)


def unequal_table(unequal: Mapping[str, Mapping[str, str]], labels: Mapping[str, str]) -> Table:
    """A row for each engine, by the names that the other tables have for it."""
    heads = ["engine", *(name.replace("_", " ") for name in ASPECTS)]
    rows = [[labels[name], *(own[a] for a in ASPECTS)] for name, own in unequal.items()]
    return Table(heads, rows, note=_NOTE)
