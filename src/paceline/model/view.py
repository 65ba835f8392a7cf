"""A model with fewer layers that costs no memory: a view of a loaded one.

A view shares its model's weights, and its layers keep their numbers: layer n of the view reads and
writes the keys and values of layer n in the model's own paged cache, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.batch import Batch, ModelOutput
from paceline.errors import ConfigError
from paceline.model.paged.segments import KeyValueStore
from paceline.model.target import CausalModel


class LayerView:
    """Some layers of a model between its embedding and its final norm and head.

    ``layers``: the numbers of those that run, in order. Called like the model, on its own cache.
    """

    def __init__(self, model: CausalModel, layers: Sequence[int]) -> None:
        """``layers``: which to run, counted from 0.

        Raises ConfigError for layers that the model does not have, UnsupportedModelError if a
        trial shows that its layers cannot be left out one by one.
        """
        self.model = model
        self.layers = tuple(sorted(set(layers)))
        if not self.layers or not 0 <= self.layers[0] <= self.layers[-1] < model.num_layers:
            raise ConfigError(
                f"{model.name} has layers 0 to {model.num_layers - 1}; "
                f"a part of it cannot be {list(self.layers)}"
            )
        skipped = frozenset(range(model.num_layers)) - frozenset(self.layers)
        self.backend = model.backend.without(skipped)

    def __call__(self, batch: Batch, cache: KeyValueStore) -> ModelOutput:
        """One forward: ``logits`` of ``batch.logit_rows``, as CausalModel's."""
        return self.backend(batch, cache)
