"""The rows of the drafters' benchmark: specs, engines around one loaded target, and timed runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import inflate
import real
from inflate_heads import inflate_heads
from paceline.build import EngineOptions, build_engine, seeded_generator
from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.draft.spec import Loading, NoDraft
from paceline.draft.swift import skippable, spread
from paceline.drafters import DRAFTERS, prepare_one
from paceline.engine.driver import Drive, column_sums, sequence
from paceline.errors import ConfigError
from paceline.model.loading import load_tokenizer
from paceline.model.names import EMBEDDED
from paceline.model.target import CausalModel

_NAMES = {"model": "draft", "tree": "draft_tree"}  # of rows, where not the kind's


@dataclass(frozen=True)
class Weights:
    """Folders of what the drafters of one target load; None where it is not there."""

    target: str
    draft: str | None = None
    medusa: str | None = None
    eagle: str | None = None
    eagle3: str | None = None
    skip: str | None = None  # the option that fixes the layers to skip


@dataclass(frozen=True)
class Entry:
    """One row. ``levels`` is the draft length of the runs at a fixed length."""

    name: str
    spec: str
    levels: int = 4


def skip_option(old: int, new: int) -> str:
    """The set that a search for layers to skip starts from, for a target inflated from ``old``
    to ``new`` layers: with each working layer the idle ones behind it.

    The search itself would find that idle layers cost nothing to skip.
    """
    where = [*inflate.places(old, new), new]
    candidates = skippable(old)
    chosen = spread(candidates, min(len(candidates), max(1, round(0.45 * old))))
    return ":skip=" + "x".join(f"{where[n]}-{where[n + 1] - 1}" for n in chosen)


def entries(weights: Weights) -> list[Entry]:
    """Every drafter; those whose weights are missing have an empty spec."""
    last = f"eagle3:{weights.eagle3}" if weights.eagle3 else f"model:{weights.draft}"
    own = {
        "tree": _with("tree:", weights.draft, ",nodes=8,width=3"),
        "layer_skip": f"layer_skip{weights.skip or ''}",
        "quantized": "quantized:int4",
        "hybrid": f"hybrid:suffix+ngram+{last}" if weights.eagle3 or weights.draft else "",
    }
    found = []
    for kind, record in DRAFTERS.items():
        folder = getattr(weights, record.weights, None)
        spec = own.get(kind, _with(f"{kind}:", folder) if record.weights else kind)
        if kind != NoDraft.kind:
            found.append(Entry(_NAMES.get(kind, kind), spec))
    return found


def weights_of(args: argparse.Namespace) -> Weights:
    """The target of ``--pair`` and what its drafters load; inflated ones are written at need.

    Raises InflateError if the target is not there.
    """
    if args.pair == real.NAME:
        folders = {kind: real.find(kind, getattr(args, kind)) for kind in real.DRAFTS}
        return Weights(str(real.target_folder(args.target, args.perturb)), **folders)
    if args.pair not in ("tiny", "inflated"):
        own = {kind: find(getattr(args, kind), lambda p: p) for kind in real.DRAFTS}
        return Weights(str(inflate.resolve(args.pair)), **own)
    source = args.target or EMBEDDED
    kinds = ("draft", "medusa", "eagle", "eagle3")
    names = {kind: getattr(args, kind, None) or f"{EMBEDDED}-{kind}" for kind in kinds}
    if args.pair == "tiny":
        same = {kind: find(name, lambda p: p) for kind, name in names.items()}
        return Weights(str(inflate.resolve(source)), **same)
    big, small = (inflate.PRESETS[preset] for preset in args.presets.split(","))
    heads = {
        kind: find(name, lambda folder: inflate_heads(folder, source, big))
        for kind, name in names.items()
        if kind != "draft"
    }
    draft = find(names["draft"], lambda folder: inflate.inflate(folder, small))
    skip = skip_option(_layers(inflate.resolve(source)), big.layers)
    return Weights(str(inflate.inflate(source, big)), draft, **heads, skip=skip)


def _layers(folder: Path) -> int:
    return inflate.read_shape(json.loads((folder / "config.json").read_text())).layers


def write_useless(weights: Weights, folder: Path) -> str:
    """The spec of a draft in the draft model's shape (else the target's), with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = weights.draft or weights.target
    if not (folder / "config.json").is_file():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        model.save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
    return f"model:{folder}"


def _with(kind: str, folder: str | None, options: str = "") -> str:
    return f"{kind}{folder}{options}" if folder else ""


def find(name: str | None, pad: Callable[[Path], Path]) -> str | None:
    """The folder of a drafter's weights, after ``pad``; None if there are none."""
    if name is None:
        return None
    try:
        return str(pad(inflate.resolve(name)))
    except inflate.InflateError:
        return None


@dataclass
class Run:
    """What one or more calls did: new tokens, target steps, wall seconds, acceptance by level."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    requests: int = 0
    first: int = 0  # tokens that the steps gave which read the prompts

    def add(self, counts: DraftCounts, tokens: int, first: int = 0) -> None:
        self.tokens += tokens
        self.first += first
        self.steps += counts.target_steps
        self.reached = list(column_sums([self.reached, counts.reached_at]))
        self.accepted = list(column_sums([self.accepted, counts.accepted_at]))

    def merge(self, other: Run) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.requests += other.requests
        self.first += other.first
        self.reached = list(column_sums([self.reached, other.reached]))
        self.accepted = list(column_sums([self.accepted, other.accepted]))

    @property
    def length(self) -> float | None:
        """Tokens per target step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def decoding_length(self) -> float | None:
        """Tokens per target step, without the step that reads the prompt: heads cannot draft
        before it, and models of their own can.

        It is what Spec-Bench calls mean accepted tokens: 1 for plain decoding.
        """
        steps = self.steps - self.requests
        return (self.tokens - self.first) / steps if steps > 0 else None

    @property
    def by_position(self) -> list[float]:
        """Of the drafts that had a token to try at a level, the share whose token was accepted."""
        return [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]


class Entrant:
    """An engine with one drafter, around a target that others use as well.

    Requests without a seed share a generator that starts at 0, so a run can be repeated.
    Raises PacelineError if the drafter cannot be had.
    """

    def __init__(self, entry: Entry, loading: Loading, length: int | str, batch: int) -> None:
        self.name = entry.name
        kind = entry.spec.partition(":")[0]
        if kind not in DRAFTERS:
            reason = f"{kind!r} is not among the drafters" if kind else "its weights are not here"
            raise ConfigError(reason)
        target = loading.target
        prepared = prepare_one(entry.spec, loading)
        options = EngineOptions(max_batch_size=batch, draft_length=length, prefix_sharing=False)
        self.engine: Any = build_engine(
            target, prepared, options, seeded_generator(target.device, 0)
        )

    def run(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float,
        ends: frozenset[int] = frozenset(),
    ) -> Run:
        """Decode prompts together, prefill included: to exactly ``max_tokens`` new tokens each, or
        to one of ``ends`` if that comes before."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=not ends)
        drive = Drive(self.engine, [sequence(ids, params, ends) for ids in prompts]).run()
        result = Run(seconds=drive.seconds, requests=len(drive.seqs))
        for seq in drive.seqs:
            whole = seq.generated == max_tokens or seq.tokens[-1] in ends
            assert whole, f"{self.name} wrote {seq.generated} tokens"
            result.add(seq.counts, seq.generated, seq.arrivals[0][1])
        return result


def load_target(folder: str, dtype: str, device: str) -> Loading:
    """The target that all entrants share."""
    target = CausalModel.load(folder, dtype=dtype, device=device)
    return Loading(target, load_tokenizer(folder), dtype)
