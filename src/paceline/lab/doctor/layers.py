"""Measures which layers of the target a head reads. Engines number layers by their inputs or by
their outputs, one less, and a head's config does not say which is meant."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.params import SamplingParams
from paceline.core.sequence import SEQUENCE_IDS, SequenceState
from paceline.core.stages import stage
from paceline.drafters import BLOCK_SIZE, parse_draft
from paceline.lab.bench.prompts import evenly, fit, load_prompts
from paceline.lab.doctor.findings import Finding, finding, findings_of
from paceline.lab.doctor.models import read_files
from paceline.llm import LLM
from paceline.model.loading import resolve_device

_PROMPTS, _TOKENS = 12, 96
_CONTEXT = 32  # tokens of a text that are only read
_STRIDE = 4  # draft from every so many positions, where each position needs a draft of its own
_MAX_BYTES = 4 << 30  # of the weights of a target that writes these texts on a CPU
_CERTAIN = 3.5  # standard errors by which other layers are better or worse
_LEAST_GAIN = 0.001  # of probability; heads that have learnt little gain less by wrong layers


def check_layers(
    target: str, draft: str, *, device: str = "auto", **settings: Any
) -> list[Finding]:
    """Let the target write some texts, and measure on them each head of a draft that reads several
    layers: with the features of its own layers, and of those one before and one after. Nothing is
    measured of weights that are not on this machine, of recurrent targets, of those in several
    processes and, on a CPU, of those above 4 GB. ``settings``: keywords of ``LLM``, which raises
    its errors."""
    heads: list[Any] = [s for s in parse_draft(draft).members() if s.argument_kind == "head"]
    heads = [s for s in heads if not read_files(s.argument(), s.weight_files).remote]
    files, on_cpu = read_files(target), resolve_device(device).type == "cpu"
    if not heads or files.remote or (on_cpu and files.stored_bytes > _MAX_BYTES):
        return []
    options: dict[str, Any] = {"device": device, "max_batch_size": _PROMPTS, **settings}
    with stage(f"loading {target}"):
        llm = LLM(target, draft="none", **options)
        if llm.target.ranks is not None or llm.target.state_bytes:
            return []
        # Features of other layers must not be taken for those of a common prefix.
        how: dict[str, Any] = {"prefix_sharing": False, "max_batch_size": _TOKENS // _STRIDE}
        drafters: list[Any] = [
            llm.with_draft(spec, draft_length=1, **how).engine.drafter for spec in heads
        ]
    # Heads of which neither the layers before nor those after exist cannot be compared.
    ends = {0, llm.target.num_layers}
    several = (pair for pair in zip(heads, drafters, strict=True) if len(pair[1].features) > 1)
    pairs = [pair for pair in several if not ends <= {*pair[1].features}]
    texts = _texts(llm) if pairs else []
    return findings_of("draft", (_verdict(llm.target, *pair, texts) for pair in pairs))


def _texts(llm: LLM) -> list[list[int]]:
    """The last tokens of shipped prompts with the target's answers of ``_TOKENS`` tokens."""
    fitting, _ = fit(load_prompts(), llm, _TOKENS)
    prompts = [ids for _, ids in evenly(fitting, _PROMPTS)]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=_TOKENS, ignore_eos=True)
    with stage(f"the target writes {len(prompts)} texts"):
        answers = llm.generate(prompts, params)
    pairs = zip(prompts, answers, strict=True)
    return [[*prompt, *answer.token_ids][-_CONTEXT - _TOKENS :] for prompt, answer in pairs]


def _verdict(target: Any, spec: Any, drafter: Any, texts: list[list[int]]) -> Finding:
    """What the texts show of a drafter, whose spec is ``spec``."""
    usual = tuple(drafter.features)
    shifted = {shift: tuple(layer + shift for layer in usual) for shift in (0, -1, 1)}
    layers = {s: n for s, n in shifted.items() if min(n) >= 0 and max(n) <= target.num_layers}
    chances: dict[int, list[float]] = {shift: [] for shift in layers}
    for text in texts:
        out = _forward(target, text, sorted({n for numbers in layers.values() for n in numbers}))
        for shift, drafter.features in layers.items():
            chances[shift] += _chances(drafter, text, out)
    unshifted = chances.pop(0)
    gains, errors = dict[int, float](), dict[int, float]()  # the latter in standard errors
    for shift, values in chances.items():
        changes = [value - before for value, before in zip(values, unshifted, strict=True)]
        gains[shift] = fmean(changes)
        errors[shift] = gains[shift] / max(stdev(changes) / len(changes) ** 0.5, 1e-9)
    best = max(gains, key=gains.__getitem__)
    found: dict[str, Any] = {"positions": len(unshifted), "layers": [*usual]}
    found |= {"others": [*layers[best]], "gain": abs(gains[best])}
    if errors[best] > _CERTAIN and gains[best] > _LEAST_GAIN:
        cure = f"Use --draft {replace(spec, feature_layers=layers[best])}."
        return finding("head-layers-wrong", cure=cure, **found)
    certain = all(error < -_CERTAIN for error in errors.values())
    return finding("head-layers-right" if certain else "head-layers-alike", **found)


def _forward(target: Any, tokens: list[int], features: list[int]) -> ModelOutput:
    """Run the target over a text: the features of all its rows."""
    seq_id, blocks = next(SEQUENCE_IDS), -(-len(tokens) // BLOCK_SIZE)
    cache = target.new_cache(blocks, BLOCK_SIZE, False)
    cache.admit(seq_id, (), False)
    cache.reserve(seq_id, len(tokens))
    batch = cache.batch_of([Span.of(seq_id, 0, tokens)], features)
    with torch.inference_mode():
        output: ModelOutput = target(batch, cache)
    return output


def _chances(drafter: Any, tokens: list[int], out: ModelOutput) -> list[float]:
    """The probability that the first drafted token is the right one, at each position after the
    first ``_CONTEXT``, or at every ``_STRIDE``-th if each takes a draft of its own."""
    if hasattr(drafter, "first_logits"):
        probs = drafter.first_logits(tokens, out)[_CONTEXT - 2 :].float().softmax(-1)
        right = torch.tensor(tokens[_CONTEXT:], device=probs.device)
        return list(probs.gather(1, right[:, None])[:, 0].tolist())
    params = SamplingParams(temperature=1.0, max_tokens=_TOKENS)
    ends = range(_CONTEXT, len(tokens), _STRIDE)
    seqs = [SequenceState(next(SEQUENCE_IDS), tokens[:end], 1, params) for end in ends]
    drafter.propose(Plan(tuple(Slice(seq.view(), len(seq.tokens) - 1) for seq in seqs)))
    read = [Commit(seq.seq_id, (), scheduled=len(seq.tokens) - 1, position=0) for seq in seqs]
    drafter.observe(read, out)
    for seq in seqs:
        seq.cached = len(seq.tokens) - 1
    trees = drafter.propose(Plan(tuple(Slice(seq.view(), 1, 1) for seq in seqs)))
    for seq in seqs:
        drafter.forget(seq.seq_id)
    pairs = zip(trees, tokens[_CONTEXT::_STRIDE], strict=True)
    return [float(tree.q[0, token]) for tree, token in pairs]
