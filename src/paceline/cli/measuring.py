"""What the measuring commands share: prompts, reports, Ctrl-C, budgets, and runs that go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from msgspec import ValidationError, convert, to_builtins
from rich.console import Console

from paceline import __version__
from paceline.cli.output import WriteOptions, print_json, shortened
from paceline.core.stages import info, stage
from paceline.errors import ConfigError, DataError, WriteError
from paceline.files import cache_folder, replace_text
from paceline.files.ownership import check_file
from paceline.lab.budget import Budget
from paceline.lab.report.document import Report
from paceline.lab.report.render import check_path, print_report, write
from paceline.model.identity import ModelIdentity
from paceline.settings import entries, flag, under
from paceline.settings.tuned import MachineIdentity

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.perplexity import TextPerplexity
    from paceline.llm import LLM
    from paceline.model.target import CausalModel

NOT_ENOUGH = 3  # exit status: nothing is wrong, but the budget was too small to say anything
_LAYOUT = 5  # of the file that a later run goes on from
MeasuredData = TypeVar("MeasuredData")
_prompts, _output, _budget = map(under, ("Prompts", "Output", "Budget"))

# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are decoded."""

    prompts: str | None = _prompts(
        None,
        "JSONL (Spec-Bench, MT-Bench, HumanEval, GSM8K or our own layout) or plain text.",
        shown="the shipped set",
    )
    category: tuple[str, ...] = _prompts((), "Only this category.", shown="all")
    per_category: int | None = _prompts(None, "So many prompts of each category.", low=1)

    def load(self, per_category: int | None = None) -> list[BenchPrompt]:
        """``per_category`` is the command's own default. Raises DataError."""
        from paceline.lab.bench.prompts import load_prompts

        return load_prompts(self.prompts, self.category, self.per_category or per_category)


@dataclass(frozen=True)
class ReportOptions(WriteOptions):
    """Where the result goes besides the terminal. Raises ConfigError on a bad report's name."""

    report: str | None = _output(None, "Also write a report, an .html or .md file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is not None:
            check_path(self.report)

    def emit(self, record: dict[str, Any], report: Report, details: bool = True) -> None:
        """Tables or JSON to stdout, and the report's file if one was asked for."""
        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console(), details)
        if self.report is not None:
            write(report, self.report)
            info(f"report: {self.report}")


@dataclass(frozen=True)
class PerplexityOptions:
    """What quantising cost."""

    perplexity: str | None = _prompts(
        None, "JSONL of texts or chats: tell the target's perplexity on them, and its original's."
    )
    original: str | None = _prompts(
        None,
        "What --model was quantised from.",
        shown="--model with --quantize or --kv-cache-dtype",
    )

    def check(self) -> None:
        """Raises DataError on a file that is not there."""
        if self.perplexity is not None and not Path(self.perplexity).is_file():
            raise DataError(f"--perplexity: there is no file {self.perplexity}; give one of texts")

    def compared(self, llm: LLM, model: str, quantize: str | None, tokens: int) -> TextPerplexity:
        """Of a loaded target; on the shipped prompts if no file is named."""
        from paceline.lab.perplexity import beside_original

        file = None if self.perplexity is None else Path(self.perplexity)
        plain = quantize is None and llm.target.cache_dtype == llm.target.dtype
        original = self.original or (None if plain else model)
        return beside_original(llm.target, llm.tokenizer, file, original, tokens)


@dataclass(frozen=True)
class RunOptions(ReportOptions):
    """How long measuring may take, whether it goes on from its last run, and where results go."""

    seconds: float = _budget(
        180.0, "Time to spend, loading counted. 0 takes as long as the whole takes.", low=0
    )
    go_on: bool = _budget(False, "Add to what the last run measured.", flags=("--continue",))
    state: str | None = _budget(
        None, "Measurements kept for --continue.", metavar="FILE", shown="in the cache folder"
    )

    def begin(self) -> Budget:
        return Budget(self.seconds or None)

    def saved(
        self, command: str, model: str, texts: Sequence[BenchPrompt], **groups: Any
    ) -> SavedRun:
        """What the last run left, if it is to be gone on from. ``groups`` (tables of options and
        single ones) and ``texts`` must be the same. Raises ConfigError."""
        options: dict[str, Any] = {}
        for name, value in groups.items():
            if is_dataclass(value) and not isinstance(value, type):
                inner = entries(type(value), "command")
                options |= {entry.flag: getattr(value, entry.name) for entry in inner}
            else:
                options[flag(name)] = value
        content = repr([(prompt.name, prompt.turns, prompt.text) for prompt in texts])
        options["the text of the prompts"] = hashlib.sha256(content.encode()).hexdigest()[:16]
        # One file for each command and model: a changed option is noticed, not overlooked.
        here = os.path.realpath(os.path.expanduser(model)) if os.path.exists(model) else model
        name = f"{command}-{hashlib.sha256(here.encode()).hexdigest()[:12]}.json"
        path = runs_folder() / name if self.state is None else Path(self.state)
        saved = SavedRun(command, path, options, required=self.state is not None)
        if self.go_on:
            saved.read()
        else:
            check_file(path, "the run's measurements", _is_run)  # before the measuring
        return saved


def runs_folder() -> Path:
    """Below the user's cache folder."""
    return cache_folder() / "runs"


# -- Ctrl-C and the time ---------------------------------------------------------------------------


class Interruption:
    """Ctrl-C ends the block early instead of the program; ``code`` is the exit status, then 130."""

    code = 0

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is KeyboardInterrupt:
            self.code = 130
            info("interrupted: the figures are of what was measured until now")
        return kind is KeyboardInterrupt


@contextmanager
def spending(what: str, budget: Budget, pieces: int = 0) -> Iterator[Callable[[str], None]]:
    """A stage of so many seconds or, without an end, of so many pieces; given what comes next."""
    seconds = budget.seconds
    total, unit = (pieces, "") if seconds is None else (seconds, "s")
    with stage(what, total, unit) as begun:
        shown = 0.0

        def advance(note: str) -> None:
            nonlocal shown
            now = shown + 1 if seconds is None else min(budget.spent, seconds)
            begun.advance(now - shown, note)
            shown = now

        yield advance


# -- measurements that a later run goes on from ----------------------------------------------------


class SavedRun:
    """One file: the options of a run, its model and machine, and its measurements."""

    def __init__(
        self, command: str, path: Path, options: dict[str, Any], required: bool = False
    ) -> None:
        if required and path.is_dir():
            raise ConfigError(f"--state {path} is a folder; name a file in it")
        self._path, self._required = path, required
        options = json.loads(json.dumps({**options, "the version": __version__}))
        self._now: dict[str, Any] = {"layout": _LAYOUT, "command": command, "options": options}
        self._before: dict[str, Any] | None = None

    def read(self) -> None:
        """Raises ConfigError if there is nothing to go on from, or another thing was measured."""
        command, kept = self._now["command"], ("layout", "command")
        try:
            before = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._refuse(f"there is no run of {command} to continue")
        except (OSError, ValueError) as error:
            self._refuse(str(error))
        if not isinstance(before, dict) or any(before.get(k) != self._now[k] for k in kept):
            self._refuse(f"it does not hold a run of paceline {command}")
        wanted, was = self._now["options"], before.get("options", {})
        for name in dict.fromkeys((*wanted, *was)):
            if was.get(name) != wanted.get(name):
                values = (_shown(options.get(name)) for options in (wanted, was))
                self._refuse("{} is {}, it was {} in the run that this holds".format(name, *values))
        self._before = before

    def measurements(
        self, kind: type[MeasuredData], target: CausalModel, timed: bool = False
    ) -> MeasuredData | None:
        """The measurements of this target to go on from; None to begin anew. Raises ConfigError if
        the run was of another target or, where time counts (``timed``), of another machine."""
        machine = asdict(MachineIdentity.of(target)) if timed else {}
        machine.pop("date", None)
        model = ModelIdentity.of(target)
        self._now |= {"machine": machine, "model": asdict(model)}
        if self._before is None:
            return None
        if self._before.get("machine") != machine:
            self._refuse("it is of another machine, or another setting of this one")
        difference = self._as(ModelIdentity, self._before.get("model")).difference(model)
        if difference is not None:
            self._refuse(f"--model is not the model of that run, {difference}")
        return self._as(kind, self._before.get("measured"))

    def keep(self, measured: Any) -> None:
        """Write it for the next run. If the file's name was given, raises WriteError."""
        text = json.dumps(self._now | {"measured": to_builtins(measured, str_keys=True)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, text, "the run's measurements", _is_run)
        except (OSError, WriteError) as error:
            if self._required:
                raise WriteError(str(error)) from None
            info(f"note: --continue will not work: {error}")

    def _as(self, kind: type[MeasuredData], value: Any) -> MeasuredData:
        known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        if isinstance(value, dict) and (strange := sorted(value.keys() - known)):
            self._refuse(f"it is of another version ({strange[0]} is unknown)")
        try:
            return convert(value, kind, strict=False)
        except (ValidationError, ValueError) as error:
            self._refuse(f"it is damaged ({error})")

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"cannot continue from {self._path}: {why}; leave --continue out to begin anew"
        ) from None


def _is_run(file: Path) -> bool:
    state = json.loads(file.read_text(encoding="utf-8"))
    return {"layout", "command", "options", "measured"} <= set(state)


def _shown(value: Any) -> str:
    return "not given" if value is None else shortened(json.dumps(value))
