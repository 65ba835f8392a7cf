"""``paceline quantize``: write a checkpoint of eight or four bits."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from paceline.cli.options import expand
from paceline.cli.output import WriteOptions
from paceline.settings import setting


@expand
def quantize(
    output: WriteOptions,
    model: str = setting(MISSING, "Folder, GGUF file, built-in or hub name.", flags=("MODEL",)),
    to: str = setting(MISSING, "Precision; w4a16 is 4 bits for vLLM.", metavar="int8|int4|w4a16"),
    out: Path = setting(MISSING, "Folder to write; replaced if Paceline wrote all that is in it."),
    calibrate: Path | None = setting(
        None, "Text to round by (GPTQ), JSONL; without it to the nearest code.", metavar="FILE"
    ),
    tokens: int = setting(32_768, "Tokens of the calibration text to read.", low=512),
    evaluate: Path | None = setting(
        None,
        "Text for the perplexity.",
        metavar="FILE",
        shown="other documents of the calibration text, else bench's prompts",
    ),
    group: int = setting(32, "Inputs that share a scale, at 4 bits: 32, 64 or 128."),
    head: str | None = setting(
        None, "Quantise the head, too (vLLM wants it as it is).", metavar="int8|int4", shown=""
    ),
    seed: int = setting(0, "Of the choice of texts.", low=0),
) -> None:
    """Round a model's weights to 8 or 4 bits, and say what that costs in perplexity.

    The layout is that of compressed-tensors, which transformers loads, too, and vLLM but for int4.
    """
    from paceline.lab.quantize import quantize as run
    from paceline.model.quantised.convert import scheme_named

    report = run(model, out, scheme_named(to, group, head), calibrate, tokens, evaluate, seed)
    output.show(report.record(), report.table())
