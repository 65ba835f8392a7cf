"""``paceline export``: the same target, draft, length and rule as another engine says them."""

from __future__ import annotations

from paceline.tools.export.run import DIALECTS as DIALECTS
from paceline.tools.export.run import export as export
