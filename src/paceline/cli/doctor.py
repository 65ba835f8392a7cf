"""``paceline doctor``: what is wrong with a target and a drafter, before they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from paceline.cli.export import ENGINES
from paceline.cli.measuring import Interruption, ReportOptions, spending
from paceline.cli.options import ModelOptions, expand
from paceline.core.stages import stage
from paceline.lab.budget import Budget
from paceline.settings import AdapterSettings, explicit, setting

if TYPE_CHECKING:
    from paceline.lab.doctor.trial import SpeedupTrial


def _trial(engine: ModelOptions) -> SpeedupTrial:
    """Load the pair and measure it."""
    from paceline.lab.doctor.trial import SECONDS, run_trial

    plain = engine.open(None)
    memory = engine.kv_cache_memory
    spec = plain.beside(
        engine.resolved_draft, max_batch_size=1, draft_length=1, kv_cache_memory=memory
    )
    budget = Budget(SECONDS)
    with spending("measuring", budget) as advance:
        return run_trial(plain, spec, budget, lambda: advance(""))


@expand
def doctor(
    engine: ModelOptions,
    adapters: AdapterSettings,
    output: ReportOptions,
    run: bool = setting(False, "Load the pair as well, and measure it for ten seconds."),
    for_engine: str | None = setting(
        None,
        "Say what that engine will do with the draft, or with --draft @FILE of its own.",
        flags=("--for",),
        metavar=ENGINES,
        shown="",
    ),
) -> int:
    """Look at a model and its draft before loading them: what will go wrong, and what helps.

    A few of the model's layers are loaded, and their logits compared with transformers'.

    Exits with 1 if there is an error among the findings.
    """
    draft = engine.resolved_draft
    if run and draft is None:
        raise typer.BadParameter("--run measures a draft; leave out --draft none")
    with stage(f"examining {engine.model}"):
        from paceline.lab.doctor import Severity, check_logits, examine
        from paceline.lab.doctor.examination import look_ahead
        from paceline.lab.doctor.findings import by_severity
        from paceline.lab.doctor.trial import judge, record, report_of

        settings = explicit(vars(engine), "LLM")
        findings = examine(engine.model, draft, lora=adapters.adapters, **settings)
        if for_engine is not None:
            pair = for_engine, engine.model, draft, engine.foreign
            findings += look_ahead(*pair, **engine.speculation())

    def wrong(*about: str) -> bool:
        """Whether there is an error: of this, or of anything."""
        errors = (item for item in findings if item.severity is Severity.ERROR)
        return any(not about or item.about in about for item in errors)

    trial = None
    with Interruption() as interrupted:
        if not wrong("target"):
            how = {"device": engine.device, "backend": engine.backend}
            findings.append(check_logits(engine.model, **how))
        if run and not wrong():
            trial = _trial(engine)
            findings += judge(trial)
    about = engine.model, draft, by_severity(findings), trial
    output.emit(record(*about), report_of(*about))
    return interrupted.code or int(wrong())
