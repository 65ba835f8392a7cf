"""The options that several commands share, and how a model is loaded by them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.expand import expand as expand
from paceline.cli.pull import fetch, in_short
from paceline.core.cgroup import processors
from paceline.core.stages import stage
from paceline.draft.foreign import ForeignDraft, read_foreign
from paceline.errors import ConfigError, PacelineError
from paceline.model.names import DEFAULT_DRAFT as DEFAULT_DRAFT
from paceline.model.names import IN_WORDS, default_model
from paceline.settings import EngineSettings, LoadSettings, changed, explicit, under

if TYPE_CHECKING:
    from paceline import LLM, Grammar, SamplingParams
    from paceline.request.defaults import SamplingDefaults

_model, _output = under("Model"), under("Output")


def set_threads(threads: int | None) -> None:
    """Use this many processor threads, at most one for each processor that this process may run
    on: more wait for each other, for minutes. None keeps torch's own choice."""
    if threads is None:
        return
    import torch

    most = processors()
    if threads > most:
        line = f"note: {threads} threads are too many for the {most} processors here; using {most}"
        print(line, file=sys.stderr)
    torch.set_num_threads(min(threads, most))


def chosen_model(given: str) -> str:
    """The model that was named, else the default, with a line on stderr that says which.

    One that has yet to be pulled is offered to whoever sits at a terminal.
    """
    if given:
        return offered(given)
    choice = default_model()
    if choice.note is not None:
        print(choice.note, file=sys.stderr)
    return offered(choice.model)


def offered(model: str) -> str:
    """Ask at a terminal whether a model that is not here shall be pulled; fetch it if so."""
    from paceline.model.names import NotPulledError, resolve

    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return model  # never unasked: loading it says what to do
    try:
        resolve(model)
    except NotPulledError as error:
        if typer.confirm(f"{in_short(error.entry)} Pull it now?", default=True, err=True):
            fetch(error.entry.name, quiet=True)
    except PacelineError:
        pass  # said where it is loaded
    return model


@dataclass(frozen=True)
class TargetName:
    """Which model is loaded."""

    model: str = _model("", "Model folder, GGUF file, hub name or built-in name.", shown=IN_WORDS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", chosen_model(self.model))


@dataclass(frozen=True)
class _PairNames(TargetName):
    draft: str | None = _model(
        None,
        "Draft model, 'ngram', a spec such as 'tree:PATH,branching=2x2x1', several that take "
        "turns ('hybrid:ngram+model:PATH'), @FILE of vLLM or SGLang, 'auto' (lookups, what was "
        "trained for the model, its own 4-bit form: all that can pay), or 'none'.",
        shown=DEFAULT_DRAFT,
    )
    profile: str | None = _model(
        None,
        "File of paceline tune: the settings that the other options leave open.",
        flags=("--config",),
        metavar="FILE",
    )


@dataclass(frozen=True)
class ModelOptions(EngineSettings, _PairNames):
    """What is loaded and how it runs."""

    foreign: ForeignDraft | None = None  # what the draft was read from; no option

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft is None or not self.draft.startswith("@"):
            return
        foreign = read_foreign(self.draft[1:])
        length = foreign.length if self.draft_length is None else self.draft_length
        values = {"foreign": foreign, "draft": foreign.spec, "draft_length": length}
        values["rule"] = self.rule or foreign.rule
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def resolved_draft(self) -> str | None:
        """The draft asked for, else the profile's, else "auto"; None decodes plainly.

        Raises ConfigError on a profile that cannot be used.
        """
        draft = self.draft or DEFAULT_DRAFT
        if self.draft is None and self.profile is not None:
            from paceline.settings.tuned import TunedProfile

            draft = TunedProfile.read(self.profile).draft.spec
        return None if draft.lower() == "none" else draft

    def open(self, draft: str | None) -> LLM:
        """Load the model with this draft (None decodes plainly)."""
        # A profile's draft is resolved already.
        return load_llm(self, self.model, "none" if draft is None else draft, self.profile)

    def speculation(self) -> dict[str, Any]:
        """What of these is said to another engine: the keywords of ``export``."""
        names = ("draft_length", "rule", "max_batch_size", "lossy", "profile")
        return {name: getattr(self, name) for name in names}

    def plain_beside(self, llm: LLM) -> LLM:
        """Plain decoding over the weights of one that was opened, with as large batches."""
        batch = llm.engine.scheduler.config.max_batch_size
        return llm.beside(None, max_batch_size=batch, kv_cache_memory=self.kv_cache_memory)


def load_llm(
    settings: LoadSettings,
    model: str,
    draft: str | Sequence[str] | None,
    profile: str | None = None,
    **more: Any,
) -> LLM:
    """Load a model as ``settings`` and ``more`` say, quietly but for the notes on how it went."""
    with stage("starting"):
        set_threads(settings.threads)
        from paceline import LLM

        llm = LLM(model, draft, profile=profile, **explicit(vars(settings), "LLM"), **more)
    for note in llm.notes:
        print(f"note: {note}", file=sys.stderr)
    return llm


@dataclass(frozen=True)
class OutputOptions:
    """How completions are shown."""

    as_json: bool = _output(False, "One JSON object a completion.", flags=("--json",))
    show_draft: bool | None = _output(
        None,
        "Colour the tokens that came from the draft.",
        flags=("--show-draft/--hide-draft",),
        shown="on a terminal",
    )


_sampling = under("Sampling")


@dataclass(frozen=True)
class DistributionOptions:
    """What shapes a request's distribution; names, defaults and meanings are those of
    SamplingParams. What is None is as the model's default (``SamplingDefaults``)."""

    temperature: float | None = _sampling(0.0, "0 is greedy.", flags=("--temperature", "-t"))
    top_k: int | None = _sampling(0, "Keep the k likeliest; 0 is off.")
    top_p: float | None = _sampling(1.0, "Keep this much probability.")
    min_p: float | None = _sampling(0.0, "Drop tokens below this share of the likeliest.")
    repetition_penalty: float | None = _sampling(1.0, "Above 1 discourages repeats.")
    presence_penalty: float = _sampling(0.0, "Lowers tokens that occurred, from -2 to 2.")
    frequency_penalty: float = _sampling(0.0, "Lowers tokens by each occurrence, from -2 to 2.")
    logit_bias: tuple[str, ...] = _sampling(
        (), "Add to a token's logit; repeatable.", metavar="ID=VALUE"
    )

    def params(self, defaults: SamplingDefaults | None = None) -> SamplingParams:
        """``defaults`` are the model's. Raises ConfigError on a value out of range."""
        from paceline import SamplingParams
        from paceline.request.defaults import SamplingDefaults

        given = {item.name: vars(self)[item.name] for item in fields(SamplingDefaults)}
        filled = SamplingDefaults(**given).over(defaults or SamplingDefaults()).filled()
        values = vars(self) | filled
        values["logit_bias"] = parse_logit_bias(self.logit_bias)
        if values.get("grammar") is not None:
            values["grammar"] = parse_grammar(values["grammar"])
        return SamplingParams(**values)


_of_model = partial(changed, DistributionOptions, default=None, shown="the model's")


@dataclass(frozen=True)
class SamplingOptions(DistributionOptions):
    """One request's parameters."""

    temperature: float | None = _of_model("temperature")
    top_k: int | None = _of_model("top_k")
    top_p: float | None = _of_model("top_p")
    min_p: float | None = _of_model("min_p")
    repetition_penalty: float | None = _of_model("repetition_penalty")
    max_tokens: int = _sampling(128, "Most new tokens.")
    min_tokens: int = _sampling(0, "Fewest new tokens.")
    seed: int | None = _sampling(None, "Same seed, same text, whatever the draft.", shown="random")
    stop: tuple[str, ...] = _sampling((), "Stop at this string; repeatable.")
    stop_token_ids: tuple[int, ...] = _sampling(
        (), "Stop at this token id; repeatable.", flags=("--stop-token-id",)
    )
    ignore_eos: bool = _sampling(False, "Go on after end-of-sequence tokens.")
    logprobs: int | None = _sampling(
        None, "Log probabilities of so many alternatives to each token, in --json."
    )
    grammar: str | None = _sampling(
        None,
        "What the text must look like: json, json:SCHEMA, regex:..., lark:..., or KIND:@FILE.",
        metavar="KIND:TEXT",
    )
    skip_special_tokens: bool = _sampling(True, "Leave special tokens out of the text.")
    n: int = _sampling(1, "Completions of each prompt.", flags=("--n",))


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    split = (pair.partition("=") for pair in pairs)
    try:
        return {int(token): float(value) for token, _, value in split}
    except ValueError:
        raise typer.BadParameter(
            f"--logit-bias {' '.join(pairs)}: write ID=VALUE, as in 42=-5"
        ) from None


def parse_grammar(text: str) -> Grammar:
    """``json``, ``KIND:TEXT`` or ``KIND:@FILE``. Raises ConfigError."""
    from paceline import Grammar

    kind, colon, body = text.partition(":")
    if text == "json":
        return Grammar.json()
    if not colon:
        raise ConfigError(f"--grammar {text!r}: write KIND:TEXT, as in regex:[0-9]+")
    if body.startswith("@"):
        try:
            body = Path(body[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--grammar: cannot read {body[1:]}: {error}") from None
    return Grammar(kind, body)
