"""How commands take their options from tables of settings, and how they come to a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from paceline.cli.output import quiet_libraries
from paceline.core.keywords import our_name
from paceline.core.memory import processors
from paceline.core.stages import info, stage
from paceline.draft.foreign import foreign_of
from paceline.errors import ConfigError, PacelineError
from paceline.model.names import (
    DEFAULT_DRAFT,
    IN_WORDS,
    NotPulledError,
    default_model,
    resolve,
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

# What --help shows of a command with more than so many options; --help-all shows them all.
_MANY = 12
_COMMON = frozenset(
    (
        *("model", "draft", "temperature", "max_tokens", "chat"),
        *("prompt", "system", "as_json", "method", "seconds", "url"),
        *("to", "run", "host", "port", "config", "served_model_name", "api_key_file"),
        *("data", "valid", "out", "steps"),
    )
)


def switches_take_nothing(params: Sequence[Any]) -> None:
    """Typer shows a type behind switches, too, as if a value were to follow."""
    for item in params:
        if getattr(item, "is_flag", False):
            item.metavar = ""


class Command(TyperCommand):
    """A command that also takes the names of other places and engines (core/keywords.py): a model
    by position or by --model, --drafter for --draft, --tensor-parallel-size ..."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {option for item in self.params for option in (*item.opts, *item.secondary_opts)}
        arguments = flags - {option for option in flags if option.startswith("-")}
        given: dict[str, str] = {}  # by our name
        words: list[str] = []
        if not arguments and "--model" in flags and args and not args[0].startswith("-"):
            given["--model"], words, args = "MODEL", ["--model", args[0]], args[1:]
        end = args.index("--") if "--" in args else len(args)
        for word in args[:end]:
            name, equals, value = word.partition("=")
            ours = self._ours(name, flags | {flag(argument) for argument in arguments})
            if given.setdefault(ours, name) != name:
                other = name if name != ours else given[ours]
                raise typer.BadParameter(f"{other} is {ours} here; give it once")
            if ours[2:] not in arguments:
                words.append(f"{ours}{equals}{value}")
            elif equals:  # by position here
                words.append(value)
        for ours, name in given.items():
            if name.startswith("--") and name != ours:
                print(f"note: {name} is {ours} here", file=sys.stderr)
        return super().parse_args(ctx, words + args[end:])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        switches_take_nothing(self.get_params(ctx))
        super().format_help(ctx, formatter)

    @staticmethod
    def _ours(name: str, flags: set[str]) -> str:
        """Our name of an option, or the word as it is. Raises BadParameter with what to do."""
        if not name.startswith("--"):
            return name
        if (dashed := name.replace("_", "-")) in flags:
            return dashed
        known = {option[2:].replace("-", "_") for option in flags}
        ours = our_name(name[2:].replace("-", "_"), known)
        if " " in ours:
            raise typer.BadParameter(f"there is no {name}; {ours}")
        return flag(ours) if ours else name


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
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
    """Replace parameters annotated with a table of settings (or ``Annotated[TABLE, settings]``) by
    the table's options, and those whose default is a ``setting`` by its option. Others are left to
    Typer. What the command does is shown, and what it returns is its exit status."""
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
            for name, (kind, listed) in tables.items():
                values[name] = kind(**{entry.name: values.pop(entry.name) for entry in listed})
            code = command(**values)
        if code:
            raise typer.Exit(code)

    # By keyword: then one with a default may stand before one without.
    many = len(options) > _MANY
    made = [_parameter_of(entry, many) for entry in options.values()]
    ordered = [
        item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for item in (*others, *made, *([_HELP_ALL] if many else ()))
    ]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {item.name: item.annotation for item in ordered}
    call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    return call


def left_open(entry: TableEntry) -> TableEntry:
    """The setting as None where it is not given; its range is looked at by whoever reads it."""
    shown = entry.key.shown or str(entry.default).lower().removesuffix(".0")
    key = replace(entry.key, shown=shown, low=None, high=None, kind="")
    kind = str if entry.key.kind else entry.type
    return replace(entry, type=kind, default=None, optional=True, key=key)


def _parameter_of(entry: TableEntry, among_many: bool = False) -> inspect.Parameter:
    """A setting as Typer knows options. Among many the common ones come first, and the others,
    under their headings, only in --help-all."""
    key, default = entry.key, entry.default
    kind: Any = entry.type
    if key.kind:
        kind = str
    elif entry.is_list:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    shown: Any = False if key.shown == "" else key.shown or True
    limits: dict[str, Any] = {} if key.kind else {"min": key.low, "max": key.high}
    # A switch that is off needs no --no-... where its default is known.
    flags = key.flags or ((entry.flag,) if default is False else ())
    if default is MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) if key.kind else [*default]
    help = f"{key.help} One of {', '.join(key.choices)}." if key.choices else key.help
    seen = not among_many or entry.name in _COMMON or default is inspect.Parameter.empty
    common: dict[str, Any] = {"help": escape(help), "show_default": shown, "hidden": not seen}
    common |= limits
    if flags and not flags[0].startswith("-"):
        option: Any = typer.Argument(metavar=flags[0], **common)
    else:
        panel = None if among_many and seen else key.panel or None
        if entry.is_list and not key.kind:
            common["help"] += " Repeatable."
        option = typer.Option(*flags, metavar=key.metavar, rich_help_panel=panel, **common)
    if entry.optional:
        kind = kind | None
    how = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, how, default=default, annotation=Annotated[kind, option])


def _value(entry: TableEntry, given: Any) -> Any:
    """What Typer found, as the table holds it; a text that cannot be read is a usage error."""
    if given is not None and (entry.key.kind or isinstance(given, float)):  # perhaps a NaN
        try:
            return entry.read(given, entry.flag)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return tuple(given or ()) if entry.is_list else given


# -- models ----------------------------------------------------------------------------------------


def set_threads(threads: int | None) -> None:
    """Use so many threads (None: torch's choice), at most one a processor: more would wait."""
    if threads is None:
        return
    import torch

    most = processors()
    if threads > most:
        line = f"note: {threads} threads are too many for the {most} processors here; using {most}"
        print(line, file=sys.stderr)
    torch.set_num_threads(min(threads, most))


def chosen_model(given: str) -> str:
    """The model that was named, else the default, with a line that says which. At a terminal, one
    that has yet to be pulled is fetched if the user agrees."""
    model, note = (given, None) if given else default_model()
    if note is not None:
        info(note)
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return model  # never unasked: loading it says what to do
    try:
        resolve(model)
    except NotPulledError as error:
        entry = error.entry
        named = f"{entry.full_name} ({entry.what}, {entry.licence})"
        question = f"{named} is not here yet: {entry.sizes}, from the {entry.source}. Pull it now?"
        if typer.confirm(question, default=True, err=True):
            from paceline.pull import pull

            pull(entry.name)
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
        "Draft model, a spec such as 'ngram' or 'hybrid:ngram+model:PATH', @FILE of vLLM or "
        "SGLang, 'auto' (all likely to help), or 'none'.",
        shown=DEFAULT_DRAFT,
    )
    config: str | None = _model(
        None,
        "File of `paceline tune` for settings not given here.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class ModelOptions(EngineSettings, _PairNames):
    """What is loaded and how it runs."""

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

    @property
    def resolved_draft(self) -> str | None:
        """The draft asked for, else the tuned, else "auto"; None decodes plainly. Raises
        ConfigError on tuned settings that cannot be used."""
        draft = self.draft or DEFAULT_DRAFT
        if self.draft is None and self.config is not None:
            draft = TunedSettings.read(self.config).draft.spec
        return None if draft.lower() == "none" else draft

    def open(self, draft: str | None, **more: Any) -> LLM:
        """Load the model with this draft (None decodes plainly)."""
        # The tuned draft is resolved already.
        draft = "none" if draft is None else draft
        return load_llm(self, self.model, draft, self.config, **more)

    @property
    def length_and_rule(self) -> tuple[Any, str]:
        """Asked for, else the tuned (a length only with its draft), else auto."""
        length, rule = self.draft_length, self.rule
        if self.config is not None:
            tuned = TunedSettings.read(self.config)
            rule = rule or tuned.engine.rule
            if length is None and self.resolved_draft == tuned.draft.spec:
                length = tuned.draft.length
        return ("auto" if length is None else length), rule or "auto"

    def beside(self, llm: LLM, **sizes: int) -> LLM:
        """The draft over the weights of one that was opened, as ``open`` has it."""
        length, rule = self.length_and_rule
        how = explicit({**vars(self), "draft_length": length, "rule": rule}, "beside")
        other = llm.beside(self.resolved_draft, **how | sizes)
        for note in other.notes:
            info(f"note: {note}")
        return other

    def plain_beside(self, llm: LLM) -> LLM:
        """Plain decoding over the weights of one that was opened, with as large batches."""
        batch = llm.engine.scheduler.config.max_batch_size
        return llm.beside(None, max_batch_size=batch, kv_cache_memory=self.kv_cache_memory)


def load_llm(
    settings: LoadSettings,
    model: str,
    draft: str | Sequence[str] | None,
    config: str | None = None,
    **more: Any,
) -> LLM:
    """Load a model as ``settings`` and ``more`` say, quietly but for the notes on how it went."""
    quiet_libraries()  # a server's engine may have a process of its own
    with stage("starting"):
        set_threads(settings.threads)
        from paceline import LLM

        llm = LLM(model, draft, config=config, **explicit(vars(settings), "LLM"), **more)
    for note in llm.notes:
        info(f"note: {note}")
    return llm
