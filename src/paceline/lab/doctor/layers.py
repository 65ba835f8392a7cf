"""Measures which layers of the target a head reads. Engines number layers by their inputs or by
their outputs, one less, and a head's config does not say which is meant."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from paceline.core.params import SamplingParams
from paceline.core.stages import stage
from paceline.drafters import parse_draft
from paceline.lab.bench.prompts import evenly, fit, load_prompts
from paceline.lab.doctor.findings import Finding, finding, findings_of
from paceline.lab.doctor.models import read_files
from paceline.llm import LLM
from paceline.model.loading import resolve_device

_PROMPTS, _TOKENS = 12, 96
_MAX_BYTES = 4 << 30  # of the weights of a target that writes these texts on a CPU
_CERTAIN = 3.5  # standard errors by which the layers one before and one after are worse


def check_layers(
    target: str, draft: str, *, device: str = "auto", **settings: Any
) -> list[Finding]:
    """Let the target write some texts, and measure on them each head of a draft that reads several
    layers: with the features of its own layers, and of those one before and one after. Nothing is
    measured of recurrent targets and, on a CPU, of those above 4 GB. ``settings``: keywords of
    ``LLM``, which raises its errors."""
    heads = [spec for spec in parse_draft(draft).members() if spec.argument_kind == "head"]
    on_cpu = resolve_device(device).type == "cpu"
    if not heads or (on_cpu and read_files(target).stored_bytes > _MAX_BYTES):
        return []
    options: dict[str, Any] = {"device": device, "max_batch_size": _PROMPTS, **settings}
    with stage(f"loading {target}"):
        llm = LLM(target, draft="none", **options)
        drafters: list[Any] = [llm.with_draft(spec).engine.drafter for spec in heads]
    origins = [drafter.origin for drafter in drafters if len(drafter.origin.layer_choices) > 1]
    texts = _texts(llm) if origins else []
    return findings_of("draft", (_verdict(origin, texts) for origin in origins))


def _texts(llm: LLM) -> list[list[int]]:
    """Token ids of shipped prompts with the target's answers of ``_TOKENS`` tokens."""
    fitting, _ = fit(load_prompts(), llm, _TOKENS)
    prompts = [ids for _, ids in evenly(fitting, _PROMPTS)]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=_TOKENS, ignore_eos=True)
    with stage(f"the target writes {len(prompts)} texts"):
        answers = llm.generate(prompts, params)
    pairs = zip(prompts, answers, strict=True)
    return [[*prompt, *answer.token_ids] for prompt, answer in pairs]


def _verdict(origin: Any, texts: list[list[int]]) -> Finding:
    """What the texts show of a drafter. ``origin``: see draft/origin.py."""
    choices = origin.layer_choices
    for text in texts:
        origin.measure(text, _TOKENS, choices)
    gains = {shift: fmean(origin.gains[shift]) for shift in choices.keys() - {0}}
    least = max(gains, key=gains.__getitem__)
    values: dict[str, Any] = {"positions": len(origin.gains[least]), "layers": [*choices[0]]}
    values |= {"others": [*choices[least]], "gain": abs(gains[least])}
    better = origin.better_layers()
    if better is not None:
        values["others"], values["gain"] = [*better[0].feature_layers], better[1]
        return finding("head-layers-wrong", cure=f"Use --draft {better[0]}.", **values)
    certain = all(origin.errors(shift) < -_CERTAIN for shift in gains)
    return finding("head-layers-right" if certain else "head-layers-alike", **values)
