"""How much quantising a model's weights, or its keys and values, raises the perplexity, by method.

    python benchmarks/perplexity.py chat.jsonl code.jsonl --calibrate more.jsonl

All of it is computed by the readable code of model/quantised in float32: minutes per method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from paceline.lab.perplexity import perplexity, read_windows
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.paged.int8 import cache_dtype
from paceline.model.probe import ATTENTION, register
from paceline.model.quantised.convert import Scheme, quantise_module
from paceline.model.target import CausalModel

INT8_CACHE = ", keys and values int8"


# Name, scheme, and whether it needs calibration text.
SCHEMES: tuple[tuple[str, Scheme | None, bool], ...] = (
    ("float32", None, False),
    (f"float32{INT8_CACHE}", None, False),
    ("int8, head int8", Scheme("int8", head="int8"), False),
    ("int8", Scheme("int8"), False),
    ("int4, free offsets, head int8", Scheme("int4", head="int8"), False),
    ("int4, whole zero points, GPTQ", Scheme("int4", zero="whole"), True),
    ("int4, whole zero points", Scheme("int4", zero="whole"), False),
    ("int4, no zero points", Scheme("int4", zero="none"), False),
)


def perplexities(
    model: str,
    scheme: Scheme | None,
    texts: Sequence[list[list[int]]],
    calibration: list[list[int]] | None,
    kv_cache_dtype: str,
) -> list[float]:
    """The perplexity of each file."""
    hf = load_module(model, "float32", "cpu", None if calibration is None else "sdpa")
    if scheme is not None:
        quantise_module(hf, scheme, calibration)
    register()
    hf.set_attn_implementation(ATTENTION)
    target = CausalModel(hf, model)
    target.cache_dtype = cache_dtype(kv_cache_dtype, target.dtype)
    return [perplexity(target, windows).value for windows in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="paceline/smollm2")
    parser.add_argument("--calibrate", type=Path, action="append", default=[])
    parser.add_argument("--tokens", type=int, default=1200, help="of each file")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    texts = [read_windows(file, tokenizer, options.tokens, seed=1) for file in options.files]
    calibration = [
        window
        for file in options.calibrate
        for window in read_windows(file, tokenizer, 12_000, seed=2)
    ]
    base: list[float] = []
    for name, scheme, calibrated in SCHEMES:
        if calibrated and not calibration:
            continue
        kind = "int8" if name.endswith(INT8_CACHE) else "auto"
        values = perplexities(
            options.model, scheme, texts, calibration if calibrated else None, kind
        )
        base = base or values
        rises = [value / plain - 1 for value, plain in zip(values, base, strict=True)]
        print(json.dumps({"method": name, "perplexity": values, "rise": rises}), flush=True)


if __name__ == "__main__":
    main()
