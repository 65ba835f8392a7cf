"""Options that commands share, each defined once as a field of a dataclass.

A command takes such a dataclass as a parameter; ``expand`` shows its fields to Typer as single
options and puts the values back together before the command runs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.cli.values import (
    parse_bytes,
    parse_draft_length,
)
from paceline.defaults import EMBEDDED, IN_WORDS, REAL, default_draft, default_model
from paceline.errors import PacelineError
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline import LLM

DEFAULT_MODEL = EMBEDDED  # of the commands that train
DEFAULT_DRAFT = "paceline/tiny-draft"

_MODEL = "Model"
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
        from paceline.cli.pull import fetch, in_short

        if typer.confirm(f"{in_short(error.entry)} Pull it now?", default=True, err=True):
            fetch(error.entry.name, quiet=True)
    except PacelineError:
        pass  # said where it is loaded
    return model


@dataclass(frozen=True)
class ModelOptions:
    """What is loaded and how it runs."""

    model: Annotated[
        str,
        typer.Option(
            help="Model folder, GGUF file, hub name or built-in name.",
            rich_help_panel=_MODEL,
            show_default=IN_WORDS,
        ),
    ] = ""
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model, 'ngram', a spec such as 'tree:PATH,branching=2x2x1', several "
            "that take turns ('hybrid:ngram+model:PATH'), or 'none'. "
            f"Default: what is built in for {REAL} and {EMBEDDED}, none for other models.",
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", chosen_model(self.model))

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
            return default_draft(self.model)
        return None if self.draft.lower() == "none" else self.draft

    def open(self, draft: str | None) -> LLM:
        """Load the model with this draft (None decodes plainly)."""
        length = parse_draft_length(self.draft_length)
        memory = None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory)
        from paceline.cli.progress import showing

        with showing(), stage("starting"):
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
