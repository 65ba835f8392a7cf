"""A draft spec for every kind of drafter, and for what else its trees may be.

``SAME``: kinds whose drafter is that of another one, with other weights.
"""

from __future__ import annotations

SAME = {"eagle", "eagle2"}
SPECS = {
    "none": "none",
    "ngram": "ngram",
    "suffix": "suffix",
    "lookahead": "lookahead",
    "recycling": "recycling",
    "model": "paceline/tiny-draft",
    "tree": "tree:paceline/tiny-draft,branching=2x2x1",
    "tree, best first": "tree:paceline/tiny-draft,nodes=6",
    "early_exit": "early_exit:layers=3",
    "early_exit, best first": "early_exit:layers=3,nodes=6",
    "quantized": "quantized:int4",
    "layer_skip": "layer_skip:window=8,interval=2",
    "medusa": "medusa:paceline/tiny-medusa",
    "eagle3": "eagle3:paceline/tiny-eagle3",
    "eagle3, best first": "eagle3:paceline/tiny-eagle3,nodes=8",
    "hybrid": "hybrid:ngram+eagle3:paceline/tiny-eagle3",
}
