"""``paceline tune``: which drafter, how long, for this model on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.continuing import BudgetOptions, SavedRun
from paceline.cli.measuring import NOT_ENOUGH, PromptOptions, ReportOptions, partial_results
from paceline.cli.options import TargetName, expand, load_llm
from paceline.cli.progress import showing, spending
from paceline.errors import ConfigError
from paceline.files.ownership import check_file
from paceline.settings import LoadSettings, setting, under

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.cli.measuring import Interruption
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.budget import Budget
    from paceline.lab.tune.measure import TuneOptions
    from paceline.lab.tune.plan import TuningOutcome

_model = under("Model")
_PER_CATEGORY = 8


@dataclass(frozen=True)
class TargetOptions(LoadSettings, TargetName):
    """The target and the drafters to try."""

    draft: tuple[str, ...] = _model(
        (),
        "A drafter to try, as for generate; repeatable. Draft models and EAGLE heads are tried "
        "as chains and trees. Drafters that need no training are tried besides.",
        shown="what is at hand",
    )
    only: bool = _model(False, "Try nothing but the drafters given.")


@dataclass(frozen=True)
class ExpectedOptions:
    """What is expected of the machine, and how it is tried."""

    concurrency: int = setting(1, "Requests expected at once.", low=1, high=1024)
    temperature: float = setting(0.0, "0 is greedy.", low=0.0, flags=("--temperature", "-t"))
    max_tokens: int = setting(48, "New tokens of each prompt.", low=2)
    rounds: int = setting(4, "Rounds of the confirmation.", low=1)


@dataclass(frozen=True)
class ProfileFile:
    """Where the result goes."""

    out: str = setting("paceline.toml", "Where the profile is written.")

    def check(self, force: bool) -> None:
        """Refuse before the minutes of measuring. Raises ConfigError."""
        path, out = Path(self.out), self.out
        if path.is_dir():
            raise ConfigError(f"--out {out} is a folder; name a file in it, as in paceline.toml")
        if path.exists() and not force:
            raise ConfigError(
                f"{out} exists already; give --force to overwrite it, or another --out"
            )
        from paceline.settings.tuned import is_profile

        check_file(path, "the profile", is_profile)


@expand
def tune(
    target: TargetOptions,
    prompts: PromptOptions,
    output: ReportOptions,
    expected: ExpectedOptions,
    file: ProfileFile,
    time: BudgetOptions,
) -> None:
    """Find the fastest drafter and settings; write them to a file for --config.

    Exit status 3 if the time was not enough to confirm anything; no profile is written then.
    """
    budget = time.begin()
    output.check()
    file.check(output.force)
    chosen_prompts = prompts.load(_PER_CATEGORY)
    from paceline.lab.tune.measure import TuneOptions
    from paceline.lab.tune.present import profile_of, report_of, tuning_record

    source = prompts.prompts or "shipped prompts"
    options = TuneOptions(**vars(expected), source=source)
    saved = time.run_of(
        "tune", target.model, chosen_prompts, target=target, prompts=prompts, **vars(options)
    )
    with showing():
        interrupted, outcome, llm = _tuned(target, chosen_prompts, options, budget, saved)
    confirmed = outcome.chosen is not None
    record = tuning_record(outcome)
    output.emit({**record, "profile": file.out if confirmed else None}, report_of(outcome))
    if not confirmed:
        print("no profile was written: nothing is confirmed", file=sys.stderr)
        interrupted.finish()
        raise typer.Exit(NOT_ENOUGH)
    profile_of(outcome, llm).write(file.out)
    print(f"profile: {file.out} (use it with --config {file.out})", file=sys.stderr)
    interrupted.finish()


def _tuned(
    target: TargetOptions,
    prompts: list[BenchPrompt],
    options: TuneOptions,
    budget: Budget,
    saved: SavedRun,
) -> tuple[Interruption, TuningOutcome, LLM]:
    """Whether Ctrl-C came, and what was measured until then."""
    from paceline.lab.tune.candidates import at_hand
    from paceline.lab.tune.plan import TuningOutcome, turns
    from paceline.lab.tune.plan import tune as run

    candidates = at_hand(target.model, target.draft, target.only)
    llm = load_llm(target, target.model, "none", max_batch_size=1)
    saved.check_model(llm.target, timed=True)
    outcome = saved.measurements(TuningOutcome) or TuningOutcome.start(options, llm)
    with (
        partial_results() as interrupted,
        spending("tuning", budget, turns(candidates, options)) as advance,
    ):
        run(llm, candidates, prompts, outcome, advance, budget)
    saved.keep(outcome)
    return interrupted, outcome, llm
