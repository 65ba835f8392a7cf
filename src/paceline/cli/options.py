"""Options that commands share, each defined once as a field of a dataclass.

A command takes such a dataclass as a parameter; ``expand`` shows its fields to Typer as single
options and puts the values back together before the command runs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.cli.values import (
    parse_bytes,
    parse_draft_length,
    parse_grammar,
    parse_logit_bias,
)

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams

DEFAULT_MODEL = "paceline/tiny"
DEFAULT_DRAFT = "paceline/tiny-draft"

_MODEL = "Model"
_SAMPLING = "Sampling"
_OUTPUT = "Output"


def expand(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace every parameter annotated with an option dataclass by that dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        assert isinstance(kind, type)
        groups[name] = kind
        field_hints = get_type_hints(kind, include_extras=True)
        for item in fields(kind):
            parameters.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_default_of(item),
                    annotation=field_hints[item.name],
                )
            )

    def call(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = kind(**{item.name: values.pop(item.name) for item in fields(kind)})
        return command(**values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    # All by keyword: then one with a default may stand before one without.
    ordered = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    return call


def _default_of(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is MISSING else item.default


def debugging() -> bool:
    """Whether tracebacks and warnings of libraries are wanted (--debug)."""
    return os.environ.get("PACELINE_DEBUG", "0") != "0"


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of the libraries below us off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    if not debugging():
        warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()


def set_threads(threads: int | None) -> None:
    """Use this many processor threads; None keeps torch's own choice."""
    if threads is None:
        return
    import torch

    torch.set_num_threads(threads)


@dataclass(frozen=True)
class ModelOptions:
    """What is loaded and how it runs."""

    model: Annotated[
        str,
        typer.Option(help="Model folder, hub name or built-in name.", rich_help_panel=_MODEL),
    ] = DEFAULT_MODEL
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model, 'ngram', a spec such as 'tree:PATH,branching=2x2x1', several "
            "that take turns ('hybrid:ngram+model:PATH'), or 'none'. "
            f"Default: {DEFAULT_DRAFT} for {DEFAULT_MODEL}, none for other models.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None
    draft_length: Annotated[
        str | None,
        typer.Option(
            help="Tokens drafted a step: a number, or auto to adapt.",
            rich_help_panel=_MODEL,
            show_default="auto",
        ),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule of sampled drafts without a seed: auto, token, block, coupled.",
            rich_help_panel=_MODEL,
            show_default="auto",
        ),
    ] = None
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy",
            help="Typical acceptance: faster sampling that is NOT the model's own distribution.",
            rich_help_panel=_MODEL,
        ),
    ] = False
    dtype: Annotated[
        str,
        typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_MODEL),
    ] = "auto"
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", rich_help_panel=_MODEL)
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processor threads.", rich_help_panel=_MODEL, show_default="torch's choice"
        ),
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, as in 512M or 2G.",
            rich_help_panel=_MODEL,
            show_default="auto",
        ),
    ] = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences decoded together.", rich_help_panel=_MODEL, show_default="8"
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of paceline tune; it gives what the options above leave open.",
            rich_help_panel=_MODEL,
        ),
    ] = None

    @property
    def resolved_draft(self) -> str | None:
        """The draft asked for, else the profile's, else the model's own; None decodes plainly.

        Raises ConfigError on a profile that cannot be used.
        """
        if self.draft is None and self.profile is not None:
            from paceline.tuned import TunedProfile

            spec = TunedProfile.read(self.profile).draft.spec
            return None if spec == "none" else spec
        if self.draft is None:
            return DEFAULT_DRAFT if self.model == DEFAULT_MODEL else None
        return None if self.draft.lower() == "none" else self.draft

    def open(self, draft: str | None) -> LLM:
        """Load the model with this draft (None decodes plainly)."""
        length = parse_draft_length(self.draft_length)
        memory = None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory)
        quiet_libraries()
        set_threads(self.threads)
        from paceline import LLM

        llm = LLM(
            self.model,
            draft="none" if draft is None else draft,  # a profile's draft is resolved already
            dtype=self.dtype,
            device=self.device,
            max_batch_size=self.max_batch_size,
            kv_cache_memory=memory,
            draft_length=length,
            rule=self.rule,
            lossy=self.lossy,
            profile=self.profile,
        )
        for note in llm.notes:
            print(f"note: {note}", file=sys.stderr)
        return llm


@dataclass(frozen=True)
class SamplingOptions:
    """One request's parameters; names, defaults and meanings are those of SamplingParams."""

    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING),
    ] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Keep the k likeliest; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep this much probability.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 discourages repeats.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="From -2 to 2, once a token.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="From -2 to 2, per occurrence.", rich_help_panel=_SAMPLING)
    ] = 0.0
    logit_bias: Annotated[
        list[str],
        typer.Option(
            metavar="ID=VALUE",
            help="Add to a token's logit; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = field(default_factory=list)
    max_tokens: Annotated[
        int,
        typer.Option(help="Stop after so many.", rich_help_panel=_SAMPLING),
    ] = 128
    min_tokens: Annotated[
        int, typer.Option(help="Do not stop before so many.", rich_help_panel=_SAMPLING)
    ] = 0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same text, whatever the draft.",
            rich_help_panel=_SAMPLING,
            show_default="random",
        ),
    ] = None
    stop: Annotated[
        list[str],
        typer.Option(help="Stop at this string; repeatable.", rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    stop_token_id: Annotated[
        list[int],
        typer.Option(help="Stop at this token id; repeatable.", rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on after end-of-sequence tokens.", rich_help_panel=_SAMPLING
        ),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log probabilities of so many alternatives (in --json).",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:TEXT",
            help="What the text must look like: json, json:SCHEMA, regex:..., lark:..., "
            "or KIND:@FILE.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool,
        typer.Option(help="Leave special tokens out of the text.", rich_help_panel=_SAMPLING),
    ] = True
    n: Annotated[
        int, typer.Option("--n", help="Completions of each prompt.", rich_help_panel=_SAMPLING)
    ] = 1

    def params(self) -> SamplingParams:
        """Raises ConfigError on a value out of range."""
        from paceline import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_id),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            grammar=None if self.grammar is None else parse_grammar(self.grammar),
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
        )


@dataclass(frozen=True)
class OutputOptions:
    """How completions are shown."""

    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object a completion.", rich_help_panel=_OUTPUT),
    ] = False
    show_draft: Annotated[
        bool | None,
        typer.Option(
            "--show-draft/--hide-draft",
            help="Colour the tokens that came from the draft.",
            rich_help_panel=_OUTPUT,
            show_default="on a terminal",
        ),
    ] = None
