"""``paceline recommend``: estimates how fast a model would run on this machine, from its headers.

A Llama of the model's width, with random weights and at most ``_PARAMETERS`` parameters, decodes in
16, 8 and 4 bits, in turns. Its forward times are scaled by the bytes that the model reads. The
engine's overhead is measured on the embedded toy model; the memory is that of the doctor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from statistics import fmean, median
from typing import Any

import torch

from paceline.build import EngineOptions
from paceline.control.acceptance import expected_tokens
from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.memory import free_memory, held_memory, limit_threads
from paceline.core.params import SamplingParams
from paceline.core.stages import Listener, listening, stage
from paceline.draft.auto import Composition
from paceline.draft.spec import DraftSpec
from paceline.engine.driver import Drive, StepTotals, sequence
from paceline.errors import UnsupportedModelError
from paceline.lab.doctor import machine
from paceline.lab.doctor.examination import check_drafts, compose_auto
from paceline.lab.doctor.machine import Needs, Setting
from paceline.lab.doctor.models import Model, describe, read_files, skeleton_of
from paceline.lab.report.document import Column, Table, record_of, table_of
from paceline.llm import LLM
from paceline.model.copies import quantised_copy
from paceline.model.loading import quiet
from paceline.model.measure import measure_target
from paceline.model.names import EMBEDDED
from paceline.model.precision import matrix_sizes, rounded_bytes
from paceline.model.quantised.mxfp4 import METHOD as MXFP4
from paceline.model.quantised.mxfp4 import MXFP4_BYTES
from paceline.model.quantised.weights import BITS
from paceline.model.target import CausalModel

_PARAMETERS = 1 << 27  # of the sample at most: in 4 bits 90 MB, more than most caches hold
_WIDEST, _HEAD = 2048, 1 << 25  # width of its layers at most, and parameters of its head
_ROWS = (1, 3, 9, 17)
# Decoding meets what other programs and virtual machines take within seconds, so all precisions
# take turns for that long, and the mean counts; of one forward, this many medians. A model that is
# as small as the sample may stay in the processor's caches while it decodes, so turns are long.
_SECONDS, _TURN, _LONGEST = 5.0, 0.1, 1.5
_TOKENS = 48  # decoded with the toy
_CONTEXT = 4096  # tokens for which the memory of keys and values is counted
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class PricedForm:
    """One way to run a model. ``precision``: to what its weights are quantised when it is loaded,
    None for none. ``rate``: tokens per second. ``memory``: bytes of weights, cache and process;
    ``loading``: the peak while the model is loaded."""

    name: str
    precision: str | None
    draft: str
    rate: float
    memory: int
    loading: int
    fits: bool

    @property
    def keeps_text(self) -> bool:
        return self.precision is None

    @property
    def flags(self) -> str:
        """Options of a command. The draft is ``auto``, which is no slower than plain decoding."""
        return f" --quantize {self.precision}" if self.precision else ""


_yes_or_no = {True: "yes", False: "no"}.__getitem__
_FORMS = (
    Column("name", "form"),
    Column("quantize", path="precision"),
    Column("draft"),
    Column("tokens_per_second", "tokens/s", "rate", "{:.3g}".format),
    Column("keeps_text", "keeps the text", shown=_yes_or_no),
    Column("memory_bytes", "memory", "memory", machine.size),
    Column("loading_bytes", "while loading", "loading", machine.size),
    Column("fits", "fits", shown=_yes_or_no),
)


@dataclass(frozen=True)
class Recommendation:
    """``memory``: bytes that the process may use. ``auto``: the drafters that "auto" stands for."""

    model: str
    memory: int
    forms: tuple[PricedForm, ...]
    auto: Composition

    @property
    def best(self) -> PricedForm | None:
        """The fastest form that fits and keeps the text, else the fastest that fits."""
        fitting = [form for form in self.forms if form.fits]
        return max(fitting, key=lambda form: (form.keeps_text, form.rate), default=None)

    @property
    def table(self) -> Table:
        note = "One request at a time, on this processor; of memory {}."
        return table_of(self.forms, _FORMS, note.format(machine.size(self.memory)))

    @property
    def notes(self) -> list[str]:
        """Advice that is not in the table."""
        notes, best = [self.auto.line()], self.best
        write = f"paceline quantize {self.model} --out FOLDER --to"
        for form in self.forms:
            if form.precision and form.memory <= self.memory < form.loading:
                notes.append(f"{form.name}: round it on a larger machine: {write} {form.precision}")
            if best is not None and form.fits and form.rate > best.rate:
                times = f"{form.rate / best.rate:.1f} times as fast as {best.name}"
                notes.append(f"{form.name}: {times}, but rounding changes its text:{form.flags}")
        if best is None:
            notes.append("nothing fits: use --offload disk, a smaller model, or a 4-bit GGUF file")
        return notes

    @property
    def lines(self) -> list[str]:
        """Commands and code to copy: a chat, a server, Python."""
        if (best := self.best) is None:
            return []
        keyword = f", quantize={best.precision!r}" if best.precision else ""
        return [
            f"paceline chat --model {self.model}{best.flags}",
            f"paceline serve {self.model}{best.flags}",
            f"llm = paceline.LLM({self.model!r}{keyword})",
        ]

    @property
    def record(self) -> dict[str, Any]:
        about = {key: getattr(self, key) for key in ("model", "memory", "notes", "lines")}
        best = None if self.best is None else self.best.name
        return {**about, "best": best, "forms": [record_of(form, _FORMS) for form in self.forms]}


def recommend(name: str, memory: int | None = None) -> Recommendation:
    """Estimate speed and memory of each form. ``memory``: bytes that the process may use (default:
    all that are free). Raises ModelLoadError and UnsupportedModelError."""
    limit_threads()
    model, findings = describe(read_files(name), "target")
    if model is None:
        raise UnsupportedModelError(findings[-1].text)
    options = (EngineOptions(device="cpu", quantize=precision) for precision in (None, *BITS))
    setting, *rounding = map(Setting.of, options)
    plain = Needs.of_model(model, setting, setting.cache_dtype)
    process = held_memory(plain.files) or 0
    budget = memory or process + free_memory(setting.device)
    composed = compose_auto(model, setting, budget - process - plain.weights)
    drafts = [spec for spec, _ in composed.taken]
    _, drafted = check_drafts(drafts, model, setting, plain)
    # The stages of measuring the sample model and the toy are not shown.
    with stage("measuring this machine"), listening(Listener()):
        sample, added = _sample(model, setting.loaded), _added()
        asked = {8 * setting.width: None} | {bits: precision for precision, bits in BITS.items()}
        turn = _TURN if model.parameters < 1.25 * _PARAMETERS else 0.0
        curves = _prices(sample, tuple(asked.values()), turn)
        prices = {bits: curves[precision] for bits, precision in asked.items()}

    def forward(bits: int, size: float) -> CostCurve:
        """The cost of a forward that reads ``size`` bytes of weights of ``bits`` bits."""
        price = prices[min(n for n in prices if n >= min(bits, max(prices)))]
        return replace(price, seconds=tuple(size * second for second in price.seconds))

    def form(title: str, how: Setting, draft: str, needs: Needs) -> PricedForm:
        # Most of what a step of GPT-OSS reads has 16 bits.
        bits = 8 * how.width if _is_mxfp4(model) else machine.held_bits(model, how)
        target = forward(bits, _read_bytes(model, how))
        step = replace(target, seconds=tuple(second + added for second in target.seconds))
        rates = [1 / step(1)]
        if draft == "auto":
            passes = forward(4, machine.rounded_bytes(model, "int4", how))
            rates += [_drafted(spec, step, passes) for spec in drafts if spec.acceptance]
        cache = needs.cache_bytes * min(_CONTEXT, model.max_positions)
        total = process + needs.weights + cache
        # The system drops pages of the files when memory is short.
        peak = max(total, process + needs.loading - model.files.stored_bytes)
        fits, precision = peak <= budget, how.precision(model)
        return PricedForm(title, precision, draft, max(rates), total, peak, fits)

    forms = [form("plain", setting, "none", plain), form("auto", setting, "auto", drafted)]
    for how, bits in zip(rounding, BITS.values(), strict=True):
        if bits < machine.held_bits(model, setting) and model.quantisation is None:
            needs = Needs.of_model(model, how, how.cache_dtype)
            forms.append(form(f"{bits} bits", how, "none", needs))
    return Recommendation(name, budget, tuple(forms), composed)


def _is_mxfp4(model: Model) -> bool:
    return (model.quantisation or {}).get("quant_method") == MXFP4


def _read_bytes(model: Model, setting: Setting) -> float:
    """Bytes of weights that a plain step reads: without the embedding and unused experts."""
    embedded = model.vocab_size * model.hidden_size
    named = model.skeleton.named_parameters()
    experts: int = sum(numbers.numel() for key, numbers in named if ".experts." in key)
    total: int = next((n for key in _EXPERTS if (n := getattr(model.config, key, 0))), 1)
    active: int = getattr(model.config, "num_experts_per_tok", None) or total
    weights = machine.weight_bytes(model, setting) - embedded * setting.width
    if _is_mxfp4(model):  # only experts are in 4 bits
        return weights - (1 - active / total) * experts * MXFP4_BYTES
    return (1 - (1 - active / total) * experts / (model.parameters - embedded)) * weights


def _sample(model: Model, dtype: torch.dtype) -> CausalModel:
    """A Llama with the model's width, within limits, and as deep as ``_PARAMETERS`` allows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = max(64, min(_WIDEST, model.hidden_size) // 64 * 64)
    vocabulary = min(model.vocab_size, _HEAD // width)
    depth = (_PARAMETERS - vocabulary * width) // (11 * width**2)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        vocab_size=vocabulary,
        num_hidden_layers=min(model.num_layers, depth),
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    numbers = torch.empty(1 << 16, dtype=dtype).uniform_(-0.04, 0.04)
    tensors = {
        key: numbers.repeat(-(-meta.numel() // len(numbers)))[: meta.numel()].view(meta.shape)
        for key, meta in skeleton_of(config).state_dict().items()
    }
    with quiet():
        hf = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    return CausalModel(hf, "a sample").use_requested_backend()


def _prices(
    sample: CausalModel, precisions: Sequence[str | None], turn: float
) -> dict[str | None, CostCurve]:
    """Seconds for each byte that a forward reads, by precision and rows. ``turn``: seconds of
    forwards of one kind, before those of the next."""
    forms: dict[str | None, CausalModel] = {None: sample}
    forms |= {name: quantised_copy(sample, name) for name in precisions if name}
    caches = {name: form.new_cache(16, 16, share=False) for name, form in forms.items()}
    times: dict[tuple[str | None, int], list[float]] = {key: [] for key in product(forms, _ROWS)}
    began = time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        for (name, rows), taken in times.items():
            until = time.perf_counter() + turn
            while True:
                measured = measure_target(forms[name], caches[name], {1: (rows,)}, 1, 0.0)
                taken += measured.curves[0].seconds
                if time.perf_counter() >= until:
                    break
    curves = {}
    for name in forms:
        plain = sum(matrix.bytes for matrix in matrix_sizes(sample.hf))
        read = rounded_bytes(sample.hf, name, sample.dtype.itemsize) if name else plain
        means = (_mean(times[name, rows]) / read for rows in _ROWS)
        curves[name] = CostCurve(_ROWS, tuple(accumulate(means, max)))
    return curves


def _mean(seconds: Sequence[float]) -> float:
    """The mean, as decoding has it, in which a hiccup counts at most ``_LONGEST`` medians."""
    longest = _LONGEST * median(seconds)
    return fmean(min(taken, longest) for taken in seconds)


def _added() -> float:
    """Seconds of a plain step outside its forward: overhead of the engine, for any model."""
    toy = LLM(EMBEDDED, "none", device="cpu", max_batch_size=1)
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    drive = Drive(toy.engine, [sequence([1], params)]).run()
    steps = [StepTotals.of([step]) for step in drive.steps if step.decodes]
    return median(step.mean_seconds("draft", "verify", "other") for step in steps)


def _drafted(spec: DraftSpec, step: CostCurve, passes: CostCurve) -> float:
    """Tokens per second at the best draft length, expected from the drafter's prior acceptance, for
    a drafter that ends a draft early when it is unsure."""
    lengths = tuple(range(spec.max_useful_length + 1))
    costs = DrafterCosts(lengths, lengths, passes, stops_early=True, prior=spec.acceptance)
    cost = CostModel(TargetCosts((1,), (step,)), {spec.kind: costs})
    tokens = expected_tokens(cost.acceptance.of_all(spec.kind).rates())
    return max(tokens[n] / cost.prices(spec.kind, 1)[n] for n in lengths)
