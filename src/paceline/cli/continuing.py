"""Measurements that a later run goes on from: where they are kept, and what must not change."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from paceline.errors import ConfigError, WriteError
from paceline.files import cache_folder
from paceline.files.ownership import check_file
from paceline.lab.budget import Budget
from paceline.settings import entries, flag, under

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.model.target import CausalModel

_LAYOUT = 3
MeasuredData = TypeVar("MeasuredData")
_budget = under("Budget")


@dataclass(frozen=True)
class BudgetOptions:
    """How long a measuring command may take, and whether it goes on from its last run."""

    seconds: float = _budget(
        180.0,
        "Time to spend, loading counted; what it completed is said. 0 takes as long as the whole "
        "takes.",
        low=0,
    )
    go_on: bool = _budget(
        False, "Add to what the last run with these options measured.", flags=("--continue",)
    )
    state: str | None = _budget(
        None,
        "Where measurements are kept for --continue.",
        metavar="FILE",
        shown="in the cache folder, by command and model",
    )

    def begin(self) -> Budget:
        return Budget(self.seconds or None)

    def run_of(
        self, command: str, model: str, texts: Sequence[BenchPrompt], **groups: Any
    ) -> SavedRun:
        """What the last run left, if it is to be gone on from. Raises ConfigError.

        ``groups``: the options, tables of them and single ones, that make another measurement;
        so do other ``texts``: a file may have another content by now.
        """
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


class SavedRun:
    """One file: the options of a run, its model and machine, and its measurements."""

    def __init__(
        self, command: str, path: Path, options: dict[str, Any], required: bool = False
    ) -> None:
        from paceline import __version__

        self._path, self._required = path, required
        kept = {"options": {**options, "the version": __version__}}
        self._now = {"layout": _LAYOUT, "command": command, **json.loads(json.dumps(kept))}
        self._before: dict[str, Any] | None = None
        if required and path.is_dir():
            raise ConfigError(f"--state {path} is a folder; name a file in it")

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

    def check_model(self, target: CausalModel, timed: bool = False) -> None:
        """Note the model and, going on, compare it; where time counts (``timed``) the machine too.

        Raises ConfigError if it is another one.
        """
        from paceline.model.identity import ModelIdentity
        from paceline.settings.tuned import MachineIdentity

        machine = asdict(MachineIdentity.of(target)) if timed else {}
        machine.pop("date", None)
        model = ModelIdentity.of(target)
        self._now |= {"machine": machine, "model": asdict(model)}
        if self._before is None:
            return
        if self._before.get("machine") != machine:
            self._refuse("it is of another machine, or another setting of this one")
        difference = self._as(ModelIdentity, self._before.get("model")).difference(model)
        if difference is not None:
            self._refuse(f"--model is not the model of that run, {difference}")

    def measurements(self, kind: type[MeasuredData]) -> MeasuredData | None:
        """The measurements to go on from; None to begin anew. Raises ConfigError."""
        if self._before is None:
            return None
        return self._as(kind, self._before.get("measured"))

    def keep(self, measured: Any) -> None:
        """Write it for the next run. If the file's name was given, raises WriteError."""
        from msgspec import to_builtins

        from paceline.files import replace_text

        text = json.dumps(self._now | {"measured": to_builtins(measured, str_keys=True)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, text, "the run's measurements", _is_run)
        except (OSError, WriteError) as error:
            if self._required:
                raise WriteError(str(error)) from None
            print(f"note: --continue will not work: {error}", file=sys.stderr)

    def _as(self, kind: type[MeasuredData], value: Any) -> MeasuredData:
        from msgspec import ValidationError, convert

        known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        if isinstance(value, dict) and (strange := sorted(value.keys() - known)):
            self._refuse(f"it is of another version ({strange[0]} is unknown)")
        try:
            return convert(value, kind, strict=False)
        except (ValidationError, ValueError) as error:
            self._refuse(f"it is damaged ({error})")

    def _refuse(self, why: str) -> NoReturn:
        cure = "leave --continue out to begin anew"
        raise ConfigError(f"cannot continue from {self._path}: {why}; {cure}") from None


def _is_run(file: Path) -> bool:
    state = json.loads(file.read_text(encoding="utf-8"))
    return {"layout", "command", "options", "measured"} <= set(state)


def runs_folder() -> Path:
    """Below the user's cache folder."""
    return cache_folder() / "runs"


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
