"""Short commands: pull, recommend, doctor, quantize, export, check-drafter and replay."""

from __future__ import annotations

import sys
import traceback
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

from paceline.cli.options import ModelOptions, expand, load_llm
from paceline.cli.output import Interruption, JsonOptions, ReportOptions, WriteOptions, print_json
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.files import check_new
from paceline.lab.report.document import Column, record_of, table_of
from paceline.model.names import EMBEDDED, model_folder
from paceline.settings import LoadSettings, changed, entries, explicit, setting


@expand
def pull(
    output: JsonOptions,
    name: str = setting(MISSING, "Name of the model: smollm2.", flags=("NAME",)),
) -> None:
    """Download a built-in model into the cache folder.

    It does nothing if the model is there already. Models of the hub (OWNER/NAME) are downloaded on
    first use. The download is checked by its SHA-256. The folder is $PACELINE_CACHE, else
    $XDG_CACHE_HOME/paceline, else ~/.cache/paceline.
    """
    from paceline.pull import pull as fetch

    entry, fetched = fetch(name)
    folder, sha256 = model_folder(entry), entry.weights_sha256
    size = (folder / "model.safetensors").stat().st_size
    about = {"folder": str(folder), "sha256": sha256, "bytes": size, "fetched": fetched}
    about |= {"location": entry.location, "licence": entry.licence}
    state = "ready" if fetched else "already there"
    output.show(
        {"name": entry.full_name, **about},
        f"{entry.full_name} is {state}: {entry.what} ({entry.licence})",
        f"  {folder}\n  SHA-256 of the weights {sha256}",
        f"Try: paceline chat --model {entry.full_name}",
    )


@expand
def recommend(
    output: JsonOptions,
    model: str = setting(MISSING, "Folder, GGUF file, built-in or hub name.", flags=("MODEL",)),
    memory: int | None = setting(
        None, "Memory that the process may use, such as 16G.", kind="size", shown="the free memory"
    ),
) -> int:
    """Predict a model's speed and memory here; print the command.

    Predicts them with and without drafts, unquantised and in 8 and 4 bits. Reads only the headers
    of its files, and measures this machine for about 10 seconds.

    Exits with 1 if the model does not fit into memory in any precision.
    """
    with stage("starting"):
        from paceline.lab import recommend as lab
    advice = lab.recommend(model, memory)
    output.show(advice.record, advice.table, *advice.notes, *advice.lines)
    return int(advice.best is None)


@expand
def doctor(engine: ModelOptions, output: ReportOptions) -> int:
    """Check a model and its draft; report problems and remedies.

    Compares the logits of a few layers with transformers', and measures which layers a head reads.

    Exit status 1 if there is an error among the findings.
    """
    draft = engine.resolved_draft
    with stage(f"examining {engine.model}"):
        from paceline.lab.doctor import Severity, check_layers, check_logits, examine
        from paceline.lab.doctor.findings import by_severity, record, report_of

        settings = explicit(vars(engine), "LLM")
        findings = examine(engine.model, draft, **settings)
    errors = {item.about for item in findings if item.severity is Severity.ERROR}
    with Interruption() as interrupted:
        if "target" not in errors:
            findings.append(check_logits(engine.model, device=engine.device))
        whole = engine.offload is None and engine.tensor_parallel == 1
        if draft is not None and whole and all(f.severity is not Severity.ERROR for f in findings):
            loads = {
                key: getattr(engine, key) for key in ("device", "dtype", "backend", "quantize")
            }
            findings += check_layers(engine.model, draft, **loads)
    examination = engine.model, draft, by_severity(findings)
    result = record(*examination)
    output.emit(result, report_of(*examination))
    return interrupted.code or int(result["errors"] > 0)


@expand
def quantize(
    output: WriteOptions,
    model: str = setting(MISSING, "Folder, GGUF file, built-in or hub name.", flags=("MODEL",)),
    to: str = setting(MISSING, "w4a16 is the 4-bit layout of vLLM.", metavar="int8|int4|w4a16"),
    out: Path = setting(MISSING, "Folder to write."),
    calibrate: Path | None = setting(
        None,
        "JSONL of calibration text for GPTQ. Without it weights are rounded to nearest.",
        metavar="FILE",
    ),
    tokens: int = setting(32_768, "Tokens of the calibration text to read.", low=512),
    evaluate: Path | None = setting(
        None,
        "Text on which perplexity is measured.",
        metavar="FILE",
        shown="other documents of the calibration text, else the prompts of bench",
    ),
    group_size: int = setting(32, "Input channels that share a scale at 4 bits: 32, 64 or 128."),
    lm_head: str | None = setting(
        None, "Also quantise lm_head (vLLM needs it unquantised).", metavar="int8|int4", shown=""
    ),
    seed: int = setting(0, "Seed of the choice of texts.", low=0),
) -> None:
    """Quantise weights to 8 or 4 bits; measure the perplexity.

    The layout is compressed-tensors. transformers loads it, and so does vLLM, except for int4.
    """
    from paceline.lab.quantize import quantize as run
    from paceline.model.quantised.convert import scheme_named

    scheme = scheme_named(to, group_size, lm_head)
    output.show(*run(model, out, scheme, calibrate, tokens, evaluate, seed, output.force))


@expand
def export(
    engine: ModelOptions,
    output: WriteOptions,
    to: str = setting(
        MISSING, "vllm, sglang, tensorrt-llm, llama.cpp or openvino.", metavar="ENGINE"
    ),
    out: Path | None = setting(
        None, "Folder for the command, the configuration and converted heads."
    ),
) -> None:
    """Write another engine's command for the same speculation.

    With --config the draft, length and rule are those that `paceline tune` found. Settings without
    an equivalent there are refused by name, or approximated with a note on the cost.
    """
    from paceline.lab.export import export as run

    if out is not None:
        check_new(out, "the export", output.force, folder=True)
    names = ("draft_length", "rule", "max_batch_size", "config")
    settings = {name: getattr(engine, name) for name in names}
    exported = run(to, engine.model, engine.resolved_draft, **settings, out=out)
    if output.as_json:
        print_json(exported.record())
        return
    for line in (*exported.steps, exported.command_line):  # ready to be pasted
        print(line)
    for approximation in exported.approximations:
        info(f"approximated: {approximation.line()}")
    needed = [name for name in exported.files if name in exported.command_line]
    needed += ["the converted head"] if "eagle" in str(exported.config) else []
    if out is None and needed:
        info(f"note: nothing was written; give --out FOLDER to get {' and '.join(needed)}")
    info(f"checked against {exported.dialect.version}")


_LAWS = (
    Column("drafter", "drafter"),
    Column("law", "law", "name"),
    Column("broken", "holds", "broken", lambda broken: broken or "yes"),
)


@expand
def check_drafter(
    output: JsonOptions,
    drafter: str = setting(
        MISSING, "The drafter: a class, a function, a record or a spec.", flags=("MODULE:NAME",)
    ),
    model: str = setting(
        EMBEDDED, "The target; a record's example specs may need weights made for it."
    ),
) -> bool:
    """Test a drafter of your own against the laws of drafters.

    Its trees must be well-formed, text and distribution must be those of plain decoding, and no
    state may remain of requests that have ended. Each distinct error is shown with a traceback.
    """
    from paceline.lab.laws import Law, drafters_of, laws

    rows: list[Law] = []
    for name, make in drafters_of(drafter, model).items():
        with stage(f"checking {name}"):
            rows += laws(name, make, model)
    broken = [law for law in rows if law.broken]
    errors = [law.error for law in reversed(broken) if law.error is not None]
    raised = {str(traceback.extract_tb(error.__traceback__)[-1]): error for error in errors}
    for error in () if output.as_json else raised.values():
        traceback.print_exception(error)
    record = {"passed": not broken, "checks": [record_of(row, _LAWS) for row in rows]}
    seen = set[str]()
    for index, law in enumerate(rows):
        if law.broken in seen:
            rows[index] = replace(law, broken="no, as above")
        seen.add(law.broken or law.name)
    output.show(record, table_of(rows, _LAWS))
    return bool(broken)


NOT_COMPARABLE = 3


@expand
def replay(
    receipt: str = setting(
        MISSING, "File with a receipt, or with an answer that has one.", flags=("RECEIPT",)
    ),
    model: str | None = setting(
        None, "Folder, file or name of the model.", shown="the one in the receipt"
    ),
    threads: int | None = changed(LoadSettings, "threads", None),
    as_json: bool = setting(False, "Print one JSON object per receipt.", flags=("--json",)),
) -> int:
    """Decode an answer again from its receipt; compare the texts.

    It is decoded without drafts. Exits with 0 if the text is the same, 1 if it differs, 3 if the
    receipt was altered or belongs to other weights or settings.
    """
    from paceline.request.receipt import ReceiptError, read_receipts

    differs = False
    try:
        receipts = read_receipts(Path(receipt))
        first = receipts[0]  # all receipts of an answer come from one engine
        recorded = {"backend": first["backend"]["name"], **first["settings"]}
        try:
            known: dict[str, Any] = {
                entry.name: entry.read(value, f"the setting {entry.name}")
                for entry in entries(LoadSettings)
                if (value := recorded.get(entry.name)) is not None
            }
            settings = LoadSettings(**known | {"threads": threads})
            llm = load_llm(settings, model or first["model"], "none", max_batch_size=1)
        except PacelineError as error:
            raise ReceiptError(f"the receipt's model: {error}") from None
        from paceline.lab.replay import replay as decode_again

        for record in receipts:
            with stage("decoding again"):
                outcome, line = decode_again(llm, record)
            differs |= not outcome["same"]
            if as_json:
                print_json(outcome)
            else:
                print(f"{line}:\n{outcome['text']}")
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    return int(differs)
