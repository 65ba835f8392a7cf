"""``paceline doctor``: what is wrong with a target and a drafter, before they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from paceline.cli.export import ENGINES
from paceline.cli.measuring import ReportOptions, partial_results
from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import quiet_libraries
from paceline.cli.progress import progress_bar, showing
from paceline.core.stages import stage
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline.lab.doctor.findings import Finding
    from paceline.lab.doctor.trial import SpeedupTrial


def _trial(engine: ModelOptions) -> SpeedupTrial:
    """Load the pair and measure it."""
    from paceline.lab.doctor.trial import SECONDS, run_trial

    with progress_bar("loading", total=int(SECONDS)) as advance:
        plain = engine.open(None)
        spec = plain.beside(
            engine.resolved_draft,
            max_batch_size=1,
            draft_length=1,
            kv_cache_memory=engine.kv_cache_memory,
        )
        shown = 0

        def progress(passed: float) -> None:
            nonlocal shown
            steps = min(int(passed), int(SECONDS)) - shown
            shown += steps
            advance(steps, "measuring")

        return run_trial(plain, spec, SECONDS, progress)


@expand
def doctor(
    engine: ModelOptions,
    output: ReportOptions,
    run: bool = setting(False, "Load the pair as well, and measure it for ten seconds."),
    for_engine: str | None = setting(
        None,
        "Say what that engine will do with the draft, or with --draft @FILE of its own.",
        flags=("--for",),
        metavar=ENGINES,
        shown="",
    ),
) -> None:
    """Look at a model and its draft before loading them: what will go wrong, and what helps.

    A few of the model's layers are loaded, and their logits compared with transformers'.

    Exits with 1 if there is an error among the findings.
    """
    output.check()
    draft = engine.resolved_draft
    if run and draft is None:
        raise typer.BadParameter("--run measures a draft; leave out --draft none")
    quiet_libraries()
    with showing(), stage(f"examining {engine.model}"):
        from paceline.lab.doctor import Severity, check_logits, examine, report
        from paceline.lab.doctor.examination import SETTINGS
        from paceline.lab.doctor.findings import by_severity
        from paceline.lab.doctor.trial import judge

        asked = {name: value for name, value in vars(engine).items() if name in SETTINGS}
        asked["max_batch_size"] = engine.max_batch_size or 8
        findings: list[Finding] = examine(engine.model, draft, **asked)
        if for_engine is not None:
            from paceline.lab.doctor.ahead import look_ahead

            ahead = look_ahead(
                for_engine, engine.model, draft, engine.foreign, **engine.speculation()
            )
            findings = by_severity([*findings, *ahead])
    trial = None
    with partial_results() as interrupted:
        if not any(item.severity is Severity.ERROR and item.about == "target" for item in findings):
            with showing():
                compared = check_logits(engine.model, device=engine.device, backend=engine.backend)
            findings = by_severity([*findings, compared])
        if run and not any(item.severity is Severity.ERROR for item in findings):
            trial = _trial(engine)
            findings = by_severity([*findings, *judge(trial)])
    document = report.report_of(engine.model, draft, findings, trial)
    output.emit(report.record(engine.model, draft, findings, trial), document)
    interrupted.finish()
    if any(item.severity is Severity.ERROR for item in findings):
        raise typer.Exit(1)
