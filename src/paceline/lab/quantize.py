"""``paceline quantize``: writes a checkpoint in 8 or 4 bits and measures its perplexity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.core.stages import info, stage
from paceline.errors import ConfigError
from paceline.files import atomic_folder, check_new, render_template
from paceline.lab.perplexity import EVALUATED, Perplexity, perplexity, read_windows, shipped_windows
from paceline.lab.report.document import Table
from paceline.lab.report.render import as_table
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.precision import is_quantised, quantization_of
from paceline.model.probe import ATTENTION
from paceline.model.quantised.convert import Scheme, quantise_module, split_experts
from paceline.model.quantised.formats import METHOD, quantization_config, tensors_of
from paceline.model.target import CausalModel

_CARD = Path(__file__).with_name("quantized_card.md")


def quantize(
    name: str,
    out: Path,
    scheme: Scheme,
    calibrate: Path | None = None,
    tokens: int = 32_768,
    evaluate: Path | None = None,
    seed: int = 0,
    force: bool = False,
) -> tuple[dict[str, Any], Table]:
    """Quantise the model ``name``, on the CPU and in float32, and write it to the folder ``out``.
    ``calibrate``: calibration text for GPTQ, of which ``tokens`` are used; None for nearest
    rounding. ``evaluate``: text for the perplexity, by default other documents of the calibration
    file. Returns a record for JSON and a table of what it cost. Raises PacelineError: an unknown or
    already quantised model, unusable text, a folder that cannot be written or, without ``force``,
    is not empty."""
    check_new(out, "the quantised model", force, folder=True)  # before the minutes of work
    with stage(f"loading {name}"):
        hf = load_module(name, torch.float32, "cpu", attention="sdpa")
        tokenizer = load_tokenizer(name)
    if is_quantised(hf) or quantization_of(hf.config) is not None:
        raise ConfigError(f"{name} is quantised already; give the model it was made from")
    texts, read = _texts(tokenizer, calibrate, tokens, evaluate, seed)
    before = _perplexity(hf, name, texts)
    rounded = quantise_module(split_experts(hf, writable=True), scheme, read)
    if not rounded.layers:
        raise ConfigError(f"{name} has no linear layer that divides into groups of 32 inputs")
    after = _perplexity(hf, name, texts)
    record = {
        "model": name,
        "out": str(out),
        **asdict(scheme),
        "rounding": "nearest" if read is None else "GPTQ",
        "layers": rounded.layers,
        "not_quantised": rounded.left,
        "bytes_before": rounded.before // 2,  # in bf16; they were read in float32
        "bytes_after": rounded.after,
        "text": (evaluate or calibrate or Path("shipped")).name,
        "before": before.record(),
        "after": after.record(),
        "perplexity_rise": after.value / before.value - 1,
    }
    whole = scheme.precision == "int4" and scheme.zero == "whole"
    table = _table(record, to := "w4a16" if whole else scheme.precision)
    card = render_template(_CARD, record=record, to=to, table=as_table(table), method=METHOD)
    with stage(f"writing {out}"), atomic_folder(out, "the quantised model") as folder:
        tensors, config = tensors_of(hf, torch.bfloat16), hf.config.to_dict()
        config |= {"dtype": "bfloat16", "quantization_config": quantization_config(hf, scheme)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        hf.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "README.md").write_text(card, encoding="utf-8")
    if rounded.left:
        info(f"{len(rounded.left)} layers do not divide into groups and stay as they are")
    return record, table


def _table(record: dict[str, Any], to: str) -> Table:
    """Size of the quantised layers and perplexity, before and after."""
    before, after = record["before"], record["after"]
    return Table(
        ["", "before", "after"],
        [
            [
                f"{record['layers']} linear layers",
                f"{record['bytes_before'] / 1e6:.1f} MB (bf16)",
                f"{record['bytes_after'] / 1e6:.1f} MB",
            ],
            [
                "perplexity",
                f"{before['perplexity']:.3f}",
                f"{after['perplexity']:.3f} ({record['perplexity_rise']:+.2%})",
            ],
        ],
        f"{record['model']} in {to}, rounding {record['rounding']}: {record['out']}",
        f"Perplexity of {before['tokens']:,} tokens ({record['text']}), as the engine computes it.",
    )


def _texts(
    tokenizer: Any, file: Path | None, tokens: int, evaluate: Path | None, seed: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    if evaluate is not None:
        evaluated = read_windows(evaluate, tokenizer, EVALUATED)
        read = None if file is None else read_windows(file, tokenizer, tokens, seed=seed)
        return evaluated, read
    if file is None:
        return shipped_windows(tokenizer, EVALUATED), None
    wanted = tokens + EVALUATED
    windows = read_windows(file, tokenizer, wanted, seed=seed)
    if len(windows) < 2:
        why = "which cannot serve for both calibration and evaluation"
        raise ConfigError(f"{file} has one text only, {why}; give more text, or --evaluate")
    kept = max(1, min(len(windows) - 1, round(len(windows) * EVALUATED / wanted)))
    return windows[:kept], windows[kept:]


def _perplexity(hf: Any, name: str, windows: Sequence[Sequence[int]]) -> Perplexity:
    """The perplexity as the engine computes it; the module's attention setting is restored."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation(ATTENTION)
    try:
        return perplexity(CausalModel(hf, name), windows)
    finally:
        hf.set_attn_implementation(before)
