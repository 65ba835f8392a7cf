"""Turns tables of settings into the options of commands, and loads the model that they name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from paceline.core.keywords import our_name
from paceline.core.libraries import quiet_libraries, set_threads
from paceline.core.stages import info, stage
from paceline.draft.foreign import foreign_of
from paceline.errors import ConfigError
from paceline.model.names import (
    DEFAULT_DRAFT,
    DEFAULT_MODEL,
    MODEL_HELP,
    default_model,
)
from paceline.request.progress import showing
from paceline.settings import (
    EngineSettings,
    LoadSettings,
    TableEntry,
    entries,
    entry_of,
    explicit,
    flag,
    under,
)
from paceline.settings.tuned import TunedSettings

if TYPE_CHECKING:
    from paceline import LLM

_model = under("Model")

# -- tables as options -----------------------------------------------------------------------------

# For commands with more than this many options, --help shows only the common ones (and required
# ones), with the first sentence about each; --help-all shows everything.
_MANY_OPTIONS = 10
_COMMON_OPTIONS = frozenset(
    (
        *("model", "draft", "quantize", "temperature", "max_tokens", "chat"),
        *("prompt", "system", "as_json", "method", "concurrency", "prompts", "seconds", "url"),
        *("host", "port", "config", "served_model_name", "api_key_file"),
        *("data", "valid", "out", "steps", "calibrate"),
    )
)


class SwitchesWithoutType:
    """Leaves out the type that Typer's help shows after a switch, as if it took a value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for item in params:
            if getattr(item, "is_flag", False):
                item.metavar = ""
        return params


class Command(SwitchesWithoutType, TyperCommand):
    """A command that also accepts the option names of other commands and engines, such as --drafter
    for --draft or --tensor-parallel-size (core/keywords.py), and the model by position."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {option for item in self.params for option in (*item.opts, *item.secondary_opts)}
        arguments = flags - {option for option in flags if option.startswith("-")}
        if "--help-all" not in flags:  # all options are in --help
            args = ["--help" if word == "--help-all" else word for word in args]
        given: dict[str, str] = {}  # the name that the user wrote, by our name
        words: list[str] = []
        if not arguments and "--model" in flags and args and not args[0].startswith("-"):
            given["--model"], words, args = "MODEL", ["--model", args[0]], args[1:]
        end = args.index("--") if "--" in args else len(args)
        for word in args[:end]:
            name, equals, value = word.partition("=")
            ours = self._our_flag(name, flags | {flag(argument) for argument in arguments})
            if given.setdefault(ours, name) != name:
                other = name if name != ours else given[ours]
                raise typer.BadParameter(f"{other} is {ours} here; give it once")
            if ours[2:] not in arguments:
                words.append(f"{ours}{equals}{value}")
            elif equals:  # this command takes it by position
                words.append(value)
        for ours, name in given.items():
            if name.startswith("--") and name != ours:
                print(f"note: {name} is {ours} here", file=sys.stderr)
        return super().parse_args(ctx, words + args[end:])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        brief = any(item.name == _HELP_ALL.name for item in self.params)
        brief &= not ctx.meta.get(_WHOLE_HELP)
        shown, parameters = copy(self), list[Any](map(copy, self.params))
        shown.params = parameters
        for item in parameters:
            item.hidden &= brief
            if brief:
                item.help = item.help.partition(". ")[0].removesuffix(".") + "."
        super(Command, shown).format_help(ctx, formatter)

    @staticmethod
    def _our_flag(name: str, flags: set[str]) -> str:
        """Our name of an option; words that are not options are returned unchanged. Raises
        BadParameter, with advice, for options of other engines that have no equivalent."""
        if not name.startswith("--"):
            return name
        if (dashed := name.replace("_", "-")) in flags:
            return dashed
        known = {option[2:].replace("-", "_") for option in flags}
        ours = our_name(name[2:].replace("-", "_"), known)
        if " " in ours:
            raise typer.BadParameter(f"there is no {name}; {ours}")
        return flag(ours) if ours else name


_WHOLE_HELP = "paceline.help_all"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_WHOLE_HELP] = True
        print(ctx.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options."),
    ],
)


def expand(command: Callable[..., int | None]) -> Callable[..., None]:
    """Make a Typer command of a function whose parameters are tables of settings.

    A parameter annotated with a table (or ``Annotated[TABLE, entries]``) is replaced by the options
    of the table, one whose default is a ``setting`` by its option; others are left to Typer. The
    command shows its progress, and its exit status is what the function returns.
    """
    hints = get_type_hints(command, include_extras=True)
    options: dict[str, TableEntry] = {}
    tables: dict[str, tuple[Callable[..., Any], Sequence[TableEntry]]] = {}
    others: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if is_dataclass(hint) or get_origin(hint) is Annotated:
            tables[name] = get_args(hint) or (hint, entries(hint, "command"))
            options |= {entry.name: entry for entry in tables[name][1]}
        elif isinstance(parameter.default, Field):
            options[name] = entry_of(name, hint, parameter.default)
        else:
            others.append(parameter.replace(annotation=hint))

    def call(**values: Any) -> None:
        quiet_libraries()
        values.pop("help_all", None)
        with showing():
            values |= {name: _value(entry, values[name]) for name, entry in options.items()}
            for name, (table, listed) in tables.items():
                values[name] = table(**{entry.name: values.pop(entry.name) for entry in listed})
            code = command(**values)
        if code:
            raise typer.Exit(code)

    many = len(options) > _MANY_OPTIONS
    parameters = [
        # Keyword-only, so that a parameter with a default may come before one without.
        item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for item in (
            *others,
            *(_typer_parameter(entry, many) for entry in options.values()),
            *([_HELP_ALL] if many else ()),
        )
    ]
    paragraphs = (command.__doc__ or "").split("\n\n")
    call.__name__ = command.__name__
    call.__doc__ = "\n\n".join(" ".join(lines.split()) for lines in paragraphs)
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def without_default(entry: TableEntry) -> TableEntry:
    """The same setting, but None if the user does not give it. Its range is not checked."""
    kind = str if entry.kind else entry.type
    shown = entry.shown or str(entry.default).lower().removesuffix(".0")
    unchecked = replace(entry, type=kind, kind="", low=None, high=None)
    return replace(unchecked, default=None, optional=True, shown=shown)


_METAVARS = {str: "TEXT", int: "N", float: "X", Path: "PATH", tuple[str, ...]: "TEXT"}


def _typer_parameter(entry: TableEntry, many: bool) -> inspect.Parameter:
    """A setting as a parameter for Typer. In a command with ``many`` options only the common ones
    are in --help; the others appear in --help-all, under their headings."""
    default, kind = entry.default, entry.type
    if entry.kind:
        kind = str
    elif entry.is_list:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    shown: Any = False if entry.shown == "" else entry.shown or True
    limits: dict[str, Any] = {} if entry.kind else {"min": entry.low, "max": entry.high}
    # A switch whose default is off does not need a --no-... form.
    flags = entry.flags or ((entry.flag,) if default is False else ())
    if default is MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) if entry.kind else [*default]
    help = f"{entry.help} One of {', '.join(entry.choices)}." if entry.choices else entry.help
    listed = not many or entry.name in _COMMON_OPTIONS or default is inspect.Parameter.empty
    common: dict[str, Any] = {"help": escape(help), "show_default": shown, "hidden": not listed}
    common |= limits
    if flags and not flags[0].startswith("-"):
        option: Any = typer.Argument(metavar=flags[0], **common)
    else:
        panel = None if many and listed else entry.panel or None
        if entry.is_list and not entry.kind:
            common["help"] += " Repeatable."
        metavar = entry.metavar or _METAVARS.get(entry.type)
        option = typer.Option(*flags, metavar=metavar, rich_help_panel=panel, **common)
    if entry.optional:
        kind = kind | None
    keyword, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[kind, option]
    return inspect.Parameter(entry.name, keyword, default=default, annotation=annotation)


def _value(entry: TableEntry, given: Any) -> Any:
    """Convert a value from Typer to the type of the setting. Raises BadParameter."""
    if given is not None and (entry.kind or isinstance(given, float)):  # it may be NaN
        try:
            return entry.read(given, entry.flag)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return tuple(given or ()) if entry.is_list else given


# -- models ----------------------------------------------------------------------------------------


def select_model(given: str) -> str:
    """The model that the user named, or the default with a note that says which it is."""
    model, note = (given, None) if given else default_model()
    if note is not None:
        info(note)
    return model


@dataclass(frozen=True)
class TargetName:
    """The model to load."""

    model: str = _model("", MODEL_HELP, shown=DEFAULT_MODEL)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", select_model(self.model))


@dataclass(frozen=True)
class _PairNames(TargetName):
    draft: str | None = _model(
        None,
        "Draft model or spec, 'auto' or 'none'. A spec is 'ngram' or 'hybrid:ngram+model:PATH', "
        "for example, or @FILE of vLLM; 'auto' is all drafters that are likely to help.",
        shown=DEFAULT_DRAFT,
    )
    config: str | None = _model(
        None,
        "File written by `paceline tune`. It is used for settings that are not given here.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class ModelOptions(EngineSettings, _PairNames):
    """The model, its draft, and how they run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        foreign = foreign_of(self.draft)
        if foreign is None:
            return
        length = foreign.length if self.draft_length is None else self.draft_length
        rule = self.rule or foreign.rule
        values = {"draft": foreign.spec, "draft_length": length, "rule": rule}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def tuned(self) -> TunedSettings | None:
        """Raises ConfigError if the file cannot be read."""
        return None if self.config is None else TunedSettings.read(self.config)

    @property
    def resolved_draft(self) -> str | None:
        """The draft that the user gave, or that of the tuned settings, or "auto"; None for plain
        decoding. Raises ConfigError."""
        draft = self.draft or (self.tuned.draft.spec if self.tuned else DEFAULT_DRAFT)
        return None if draft.lower() == "none" else draft

    def open(self, draft: str | None, **more: Any) -> LLM:
        """Load the model with a draft; None decodes plainly, whatever the tuned settings say."""
        draft = "none" if draft is None else draft
        return load_llm(self, self.model, draft, self.config, **more)

    @property
    def length_and_rule(self) -> tuple[Any, str]:
        """Those given, else "auto", or the length of the tuned draft if it is used."""
        length = self.draft_length
        if self.tuned is not None and length is None:
            follows = self.resolved_draft == self.tuned.draft.spec
            length = self.tuned.draft.length if follows else None
        return ("auto" if length is None else length), self.rule or "auto"

    def with_draft(self, llm: LLM, **sizes: int) -> LLM:
        """An LLM with the draft of these options that shares the weights of ``llm``."""
        length, rule = self.length_and_rule
        settings = explicit({**vars(self), "draft_length": length, "rule": rule}, "with_draft")
        other = llm.with_draft(self.resolved_draft, **settings | sizes)
        for note in other.setup_notes:
            info(f"note: {note}")
        return other

    def plain_beside(self, llm: LLM) -> LLM:
        """An LLM without drafts that shares the weights of ``llm`` and has the same batch size."""
        batch = llm.engine.scheduler.config.max_batch_size
        return llm.with_draft(None, max_batch_size=batch, kv_cache_memory=self.kv_cache_memory)


def load_llm(
    settings: LoadSettings,
    model: str,
    draft: str | Sequence[str] | None,
    config: str | None = None,
    **more: Any,
) -> LLM:
    """Load a model with ``settings`` and ``more``, and print the notes of the LLM."""
    with stage("starting"):
        set_threads(settings.threads)
        from paceline import LLM

        llm = LLM(model, draft, config=config, **explicit(vars(settings), "LLM"), **more)
    for note in llm.setup_notes:
        info(f"note: {note}")
    return llm
