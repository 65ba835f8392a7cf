"""Paceline's decoding inside transformers: ``model.generate(..., custom_generate=generate)``.

    from paceline.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, draft="ngram", max_new_tokens=64)

The engine runs the caller's model, in its dtype and on its device; see docs/guides/transformers.md.
"""

from __future__ import annotations

from paceline.integrations.transformers.decode import SpeculativeOutput as SpeculativeOutput
from paceline.integrations.transformers.decode import forget as forget
from paceline.integrations.transformers.decode import generate as generate
from paceline.integrations.transformers.decode import generate_whole as generate_whole
