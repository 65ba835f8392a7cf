"""A draft spec for every kind of drafter, and for what else its trees may be."""

from __future__ import annotations

from paceline.drafters import DRAFTERS

TARGET = "paceline/tiny"
WEIGHTS = {"target": TARGET} | {
    record.weights: f"{TARGET}-{record.weights}" for record in DRAFTERS.values()
}
SPECS = {kind: record.examples[0].format(**WEIGHTS) for kind, record in DRAFTERS.items()} | {
    "tree, dynamic": "tree:paceline/tiny-draft,nodes=6",
    "layer_skip, dynamic": "layer_skip:nodes=6,window=8,interval=2",
}
