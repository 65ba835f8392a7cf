"""``paceline doctor``: what is wrong with a target and a drafter, before they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.measuring import ReportOptions, partial_results
from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand, quiet_libraries
from paceline.cli.progress import progress_bar, showing
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline.tools.doctor.findings import Finding
    from paceline.tools.doctor.trial import SpeedupTrial


def _trial(engine: ModelOptions) -> SpeedupTrial:
    """Load the pair and measure it."""
    from paceline.tools.doctor.trial import SECONDS, run_trial

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


def _ahead(other: str, engine: ModelOptions) -> list[Finding]:
    """What another engine will do."""
    from paceline.tools.doctor.ahead import look_ahead

    return look_ahead(
        other,
        engine.model,
        engine.resolved_draft,
        engine.foreign,
        draft_length=engine.draft_length,
        rule=engine.rule,
        max_batch_size=engine.max_batch_size,
        lossy=engine.lossy,
        profile=engine.profile,
    )


@expand
def doctor(
    engine: ModelOptions,
    output: ReportOptions,
    run: Annotated[
        bool, typer.Option("--run", help="Load the pair as well, and measure it for ten seconds.")
    ] = False,
    for_engine: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="vllm|sglang|tensorrt-llm|llama.cpp|openvino",
            help="Say what that engine will do with the draft, or with --draft @FILE of its own.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Look at a model and its draft before loading them: what will go wrong, and what helps.

    Exits with 1 if there is an error among the findings.
    """
    output.check()
    draft = engine.resolved_draft
    if run and draft is None:
        raise typer.BadParameter(f"--run measures a draft; try --draft {DEFAULT_DRAFT} or ngram")
    quiet_libraries()
    with showing(), stage(f"examining {engine.model}"):
        from paceline.tools.doctor import Severity, examine, summary
        from paceline.tools.doctor.findings import by_severity
        from paceline.tools.doctor.verdict import judge

        findings: list[Finding] = examine(
            engine.model,
            draft,
            dtype=engine.dtype,
            device=engine.device,
            max_batch_size=engine.max_batch_size or 8,
            kv_cache_memory=engine.kv_cache_memory,
            quantize=engine.quantize,
            draft_quantize=engine.draft_quantize,
            backend=engine.backend,
            offload=engine.offload,
            weights_memory=engine.weights_memory,
            tensor_parallel=engine.tensor_parallel,
            kv_cache_dtype=engine.kv_cache_dtype,
        )
        if for_engine is not None:
            findings = by_severity([*findings, *_ahead(for_engine, engine)])
    trial = None
    with partial_results() as interrupted:
        if run and not any(item.severity is Severity.ERROR for item in findings):
            trial = _trial(engine)
            findings = by_severity([*findings, *judge(trial)])
    document = summary.report_of(engine.model, draft, findings, trial)
    output.emit(summary.record(engine.model, draft, findings, trial), document)
    interrupted.finish()
    if any(item.severity is Severity.ERROR for item in findings):
        raise typer.Exit(1)
