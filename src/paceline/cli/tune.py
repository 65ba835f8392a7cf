"""``paceline tune``: which drafter, how long, for this model on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.measuring import NOT_ENOUGH, Interruption, RunOptions, spending
from paceline.cli.options import TargetName, expand, load_llm
from paceline.core.stages import info
from paceline.errors import ConfigError
from paceline.files import check_place
from paceline.files.ownership import check_file
from paceline.lab.bench import PromptOptions
from paceline.lab.tune import TuneOptions
from paceline.settings import LoadSettings, setting, under
from paceline.settings.tuned import is_profile

_model = under("Model")
_PER_CATEGORY = 8


@dataclass(frozen=True)
class TargetOptions(LoadSettings, TargetName):
    """The target and the drafters to try."""

    draft: tuple[str, ...] = _model(
        (),
        "A drafter to try, as for generate. Draft models and EAGLE heads are tried "
        "as chains and trees. Drafters that need no training are tried besides.",
        shown="what is at hand",
    )
    only: bool = _model(False, "Try nothing but the drafters given.")


@dataclass(frozen=True)
class TuneRun(RunOptions):
    """Where the profile goes, too. Raises ConfigError, before measuring, if none may go there."""

    out: str = setting("paceline.toml", "Where the profile is written.")

    def __post_init__(self) -> None:
        super().__post_init__()
        path, out = Path(self.out), self.out
        if path.is_dir():
            raise ConfigError(f"--out {out} is a folder; name a file in it, as in paceline.toml")
        if path.exists() and not self.force:
            raise ConfigError(
                f"{out} exists already; give --force to overwrite it, or another --out"
            )
        check_file(path, "the profile", is_profile)
        check_place(path, "the profile")


@expand
def tune(
    target: TargetOptions,
    prompts: PromptOptions,
    options: TuneOptions,
    run: TuneRun,
) -> int:
    """Find the fastest drafter and settings; write them to a file for --config.

    Exit status 3 if the time was not enough to confirm anything; no profile is written then.
    """
    budget = run.begin()
    chosen_prompts = prompts.load(_PER_CATEGORY)
    from paceline.lab.tune.plan import TuningOutcome, turns
    from paceline.lab.tune.plan import tune as search
    from paceline.lab.tune.present import profile_of, report_of, tuning_record
    from paceline.lab.tune.search import at_hand

    options = replace(options, source=prompts.prompts or options.source)
    candidates = at_hand(target.model, target.draft, target.only)
    llm = load_llm(target, target.model, "none", max_batch_size=1)
    outcome = TuningOutcome.start(options, llm)
    pieces = turns(candidates, options)
    with Interruption() as interrupted, spending("tuning", budget, pieces) as advance:
        search(llm, candidates, chosen_prompts, outcome, advance, budget)
    confirmed = outcome.chosen is not None
    record = {**tuning_record(outcome), "profile": run.out if confirmed else None}
    run.emit(record, report_of(outcome))
    if not confirmed:
        info("no profile was written: nothing is confirmed")
        return interrupted.code or NOT_ENOUGH
    profile_of(outcome, llm).write(run.out)
    info(f"profile: {run.out} (use it with --config {run.out})")
    return interrupted.code
