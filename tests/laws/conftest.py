"""The law tests import their harness as a sibling."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
