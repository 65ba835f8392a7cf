"""The same target, draft, length and rule as another engine says them."""

from paceline.lab.export.dialects import DIALECTS as DIALECTS
from paceline.lab.export.dialects import export as export
