"""``paceline doctor``: what is wrong with a target and a drafter, before they are loaded."""

from __future__ import annotations

from paceline.cli.measuring import Interruption, ReportOptions
from paceline.cli.options import ModelOptions, expand
from paceline.core.stages import stage
from paceline.settings import AdapterSettings, explicit


@expand
def doctor(engine: ModelOptions, adapters: AdapterSettings, output: ReportOptions) -> int:
    """Look at a model and its draft before loading them: what will go wrong, and what helps.

    A few of the model's layers are loaded, and their logits compared with transformers'.

    Exits with 1 if there is an error among the findings.
    """
    draft = engine.resolved_draft
    with stage(f"examining {engine.model}"):
        from paceline.lab.doctor import Severity, check_logits, examine
        from paceline.lab.doctor.findings import by_severity, record, report_of

        settings = explicit(vars(engine), "LLM")
        findings = examine(engine.model, draft, lora=adapters.adapters, **settings)
    errors = {item.about for item in findings if item.severity is Severity.ERROR}
    with Interruption() as interrupted:
        if "target" not in errors:
            how = {"device": engine.device, "backend": engine.backend}
            findings.append(check_logits(engine.model, **how))
    about = engine.model, draft, by_severity(findings)
    examined = record(*about)
    output.emit(examined, report_of(*about))
    return interrupted.code or int(examined["errors"] > 0)
