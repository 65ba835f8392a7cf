"""Measurements that a later run goes on from: where they are kept, and what must not change."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import ConfigError, WriteError
from paceline.files.ownership import check_file
from paceline.lab.budget import Budget
from paceline.model.store import cache_folder
from paceline.settings import entries, flag, under

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.model.target import CausalModel

_LAYOUT = 2
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
        self, command: str, model: str, asked: Sequence[BenchPrompt], **groups: Any
    ) -> SavedRun:
        """What the last run left, if it is to be gone on from. Raises ConfigError.

        ``groups``: the options, tables of them and single ones, that make another measurement;
        so do other prompts, ``asked``.
        """
        path = _default_path(command, model) if self.state is None else Path(self.state)
        options = options_of(**groups) | _digest_of(asked)
        saved = SavedRun(command, path, options, required=self.state is not None)
        if self.go_on:
            saved.read()
        else:
            check_file(path, "the run's measurements", _is_run)  # before the measuring
        return saved


class SavedRun:
    """One file: the options of a run and its measurements."""

    def __init__(
        self, command: str, path: Path, options: dict[str, Any], required: bool = False
    ) -> None:
        from paceline import __version__

        self._command, self._path, self._required = command, path, required
        self._options = json.loads(json.dumps({**options, "the version": __version__}))
        self._record: dict[str, Any] | None = None
        if required and path.is_dir():
            raise ConfigError(f"--state {path} is a folder; name a file in it")

    def read(self) -> None:
        """Raises ConfigError if there is nothing to go on from, or another thing was measured."""
        where = f"{self._path}"
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"there is no run of {self._command} to continue ({where}); leave --continue out"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot continue from {where}: {error}; leave --continue out to begin anew"
            ) from None
        if (
            not isinstance(record, dict)
            or record.get("layout") != _LAYOUT
            or record.get("command") != self._command
        ):
            raise ConfigError(
                f"{where} does not hold a run of paceline {self._command}; leave --continue out to "
                "begin anew"
            )
        old = record.get("options", {})
        for name in dict.fromkeys((*self._options, *old)):
            was, wanted = old.get(name), self._options.get(name)
            if was != wanted:
                raise ConfigError(
                    f"cannot continue: {name} is {_shown(wanted)}, it was {_shown(was)} in the run "
                    f"that {where} holds; give the same, or leave --continue out to begin anew"
                )
        self._record = record

    def check_model(self, target: CausalModel, timed: bool = False) -> None:
        """Note the model and, going on, compare it; where time counts (``timed``) the machine too.

        Raises ConfigError if it is another one.
        """
        from paceline.model.identity import ModelIdentity
        from paceline.settings.tuned import MachineIdentity

        machine = asdict(MachineIdentity.of(target)) if timed else {}
        machine.pop("date", None)
        if self._record is not None and self._record.get("machine") != machine:
            raise ConfigError(
                f"cannot continue: this is not the machine, or not the setting of it, of the run "
                f"that {self._path} holds; leave --continue out to begin anew"
            )
        self._machine = machine
        now = ModelIdentity.of(target)
        if self._record is not None:
            difference = _as(ModelIdentity, self._record.get("model")).difference(now)
            if difference is not None:
                raise ConfigError(
                    f"cannot continue: --model is not the model of the run that {self._path} "
                    f"holds, {difference}; leave --continue out to begin anew"
                )
        self._model = asdict(now)

    def measurements(self, kind: type[MeasuredData]) -> MeasuredData | None:
        """The measurements to go on from; None to begin anew. Raises ConfigError."""
        if self._record is None:
            return None
        try:
            measured: MeasuredData = _as(kind, self._record.get("measured"))
            return measured
        except ConfigError as error:
            raise ConfigError(f"cannot continue from {self._path}: {error}") from None

    def keep(self, measured: Any) -> None:
        """Write it for the next run. If the file's name was given, raises WriteError."""
        from msgspec import to_builtins

        from paceline.files import replace_text

        record = {
            "layout": _LAYOUT,
            "command": self._command,
            "options": self._options,
            "model": self._model,
            "machine": self._machine,
            "measured": to_builtins(measured, str_keys=True),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(record), "the run's measurements", _is_run)
        except (OSError, WriteError) as error:
            if self._required:
                raise WriteError(str(error)) from None
            print(f"note: --continue will not work: {error}", file=sys.stderr)


def _is_run(file: Path) -> bool:
    state = json.loads(file.read_text(encoding="utf-8"))
    return {"layout", "command", "options", "measured"} <= set(state)


def _as(kind: Any, value: Any) -> Any:
    from msgspec import ValidationError, convert

    known = {item.name for item in fields(kind)}
    if isinstance(value, dict) and (strange := sorted(value.keys() - known)):
        raise ConfigError(
            f"it is of another version ({strange[0]} is unknown); "
            "leave --continue out to begin anew"
        )
    try:
        return convert(value, kind, strict=False)
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"it is damaged ({error}); leave --continue out to begin anew") from None


def _default_path(command: str, model: str) -> Path:
    """One file for each command and model, so that a changed option is told, not overlooked."""
    real_path = os.path.realpath(os.path.expanduser(model)) if os.path.exists(model) else model
    mark = hashlib.sha256(real_path.encode()).hexdigest()[:12]
    return runs_folder() / f"{command}-{mark}.json"


def runs_folder() -> Path:
    """Below the user's cache folder."""
    return cache_folder() / "runs"


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest_of(prompts: Sequence[BenchPrompt]) -> dict[str, str]:
    """The file may have another content by now."""
    content = repr([(prompt.name, prompt.turns, prompt.text) for prompt in prompts])
    return {"the text of the prompts": hashlib.sha256(content.encode()).hexdigest()[:16]}


def options_of(**groups: Any) -> dict[str, Any]:
    """Options by the names that users know, from dataclasses and single values."""
    options: dict[str, Any] = {}
    for name, value in groups.items():
        if is_dataclass(value) and not isinstance(value, type):
            inner = entries(type(value), "command")
            options |= {entry.flag: getattr(value, entry.name) for entry in inner}
        else:
            options[flag(name)] = value
    return options
