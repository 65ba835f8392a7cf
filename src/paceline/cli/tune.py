"""``paceline tune``: which drafter, how long, for this model on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.continuing import BudgetOptions, SavedRun, digest_of, options_of
from paceline.cli.measuring import (
    NOT_ENOUGH,
    PromptOptions,
    ReportOptions,
    finish,
    partial_results,
)
from paceline.cli.options import chosen_model, expand, quiet_libraries, set_threads
from paceline.cli.progress import showing, spending
from paceline.cli.values import parse_bytes
from paceline.defaults import IN_WORDS
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.budget import Budget
    from paceline.tools.bench.prompts import BenchPrompt
    from paceline.tools.tune.plan import TuneOptions, TuningOutcome

_TARGET = "Model"
_PER_CATEGORY = 8


@dataclass(frozen=True)
class TargetOptions:
    """The target and the drafters to try."""

    model: Annotated[
        str,
        typer.Option(
            help="Model folder, GGUF file, hub name or built-in name.",
            rich_help_panel=_TARGET,
            show_default=IN_WORDS,
        ),
    ] = ""
    draft: Annotated[
        list[str],
        typer.Option(
            help="A drafter to try, as for generate; repeatable. Draft models and EAGLE heads are "
            "tried as chains and trees. Drafters that need no training are tried besides.",
            rich_help_panel=_TARGET,
            show_default="what is at hand",
        ),
    ] = field(default_factory=list)
    only: Annotated[
        bool,
        typer.Option("--only", help="Try nothing but the drafters given.", rich_help_panel=_TARGET),
    ] = False
    dtype: Annotated[
        str,
        typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_TARGET),
    ] = "auto"
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", rich_help_panel=_TARGET)
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processor threads.", rich_help_panel=_TARGET, show_default="torch's choice"
        ),
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, as in 512M or 2G.",
            rich_help_panel=_TARGET,
            show_default="auto",
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", chosen_model(self.model))

    def open(self) -> LLM:
        """The target alone."""
        memory = None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory)
        with stage("starting"):
            quiet_libraries()
            set_threads(self.threads)
            from paceline import LLM

            return LLM(
                self.model,
                draft="none",
                dtype=self.dtype,
                device=self.device,
                max_batch_size=1,
                kv_cache_memory=memory,
            )


@expand
def tune(
    target: TargetOptions,
    prompts: PromptOptions,
    output: ReportOptions,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests expected at once.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0.0, help="0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each prompt.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the confirmation.")] = 4,
    out: Annotated[str, typer.Option(help="Where the profile is written.")] = "paceline.toml",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the profile.")] = False,
    *,
    time: BudgetOptions,
) -> None:
    """Find the fastest drafter and settings; write them to a profile for --profile.

    Exit status 3 if the time was not enough to confirm anything; no profile is written then.
    """
    budget = time.begin()
    output.check()
    _check_out(out, force)
    chosen_prompts = prompts.load(_PER_CATEGORY)
    from paceline.tools.tune.plan import TuneOptions
    from paceline.tools.tune.present import profile_of, record_of, report_of

    source = prompts.prompts or "shipped prompts"
    options = TuneOptions(concurrency, temperature, max_tokens, rounds, source)
    given = options_of(target=target, prompts=prompts, **{k: v for k, v in vars(options).items()})
    saved = time.run_of("tune", target.model, {**given, **digest_of(chosen_prompts)})
    with showing():
        interrupted, outcome, llm = _tuned(target, chosen_prompts, options, budget, saved)
    confirmed = outcome.chosen is not None and not interrupted
    record = record_of(outcome)
    output.emit({**record, "profile": out if confirmed else None}, report_of(outcome))
    if not confirmed:
        print("no profile was written: nothing is confirmed", file=sys.stderr)
        finish(interrupted)
        raise typer.Exit(NOT_ENOUGH)
    profile_of(outcome, llm).write(out)
    print(f"profile: {out} (use it with --profile {out})", file=sys.stderr)


def _tuned(
    target: TargetOptions,
    prompts: list[BenchPrompt],
    options: TuneOptions,
    budget: Budget,
    saved: SavedRun,
) -> tuple[list[bool], TuningOutcome, LLM]:
    """Whether Ctrl-C came, and what was measured until then."""
    from paceline.tools.tune.candidates import at_hand
    from paceline.tools.tune.plan import TuningOutcome, turns
    from paceline.tools.tune.plan import tune as run

    candidates = at_hand(target.model, target.draft, target.only)
    llm = target.open()
    saved.check_model(llm.target, timed=True)
    outcome = saved.found(TuningOutcome) or TuningOutcome.start(options, llm)
    with (
        partial_results() as interrupted,
        spending("tuning", budget, turns(candidates, options)) as advance,
    ):
        run(llm, candidates, prompts, outcome, advance, budget)
    saved.keep(outcome)
    return interrupted, outcome, llm


def _check_out(out: str, force: bool) -> None:
    """Refuse before the minutes of measuring. Raises ConfigError."""
    from paceline.errors import ConfigError

    path = Path(out)
    if path.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, as in paceline.toml")
    if path.exists() and not force:
        raise ConfigError(f"{out} exists already; give --force to overwrite it, or another --out")
