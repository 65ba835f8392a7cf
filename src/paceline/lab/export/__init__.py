"""``paceline export``: the same target, draft, length and rule as another engine says them."""

from __future__ import annotations

from paceline.lab.export.dialects import DIALECTS as DIALECTS
from paceline.lab.export.run import export as export
