"""``paceline replay``: decodes again, without drafts, what a receipt says was decoded."""

from __future__ import annotations

import sys
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import expand, load_llm
from paceline.cli.output import print_json
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.settings import LoadSettings, changed, entries, setting

if TYPE_CHECKING:
    from paceline import LLM

NOT_COMPARABLE = 3
_SHOWN_TOKENS = 8  # of either text, from where they part


def _replay(llm: LLM, receipt: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Decode a receipt's answer plainly: the outcome as JSON (``parts``: index of the first token
    that differs, None if none does; ``expected`` and ``got``: the texts from there on), and as a
    line. Raises ReceiptError on other weights or settings."""
    from paceline.lab.certify.decoding import first_difference
    from paceline.request.receipt import ReceiptError, sampling_of_receipt

    here = llm.receipts.origin
    for what in ("weights", "tokenizer"):
        if here[what] != receipt[what]:
            raise ReceiptError(
                f"other {what}: the receipt has {receipt[what][:12]} ({receipt['model']}), "
                f"{llm.target.name} has {here[what][:12]}; name the model it was made with"
            )
    theirs, ours = receipt["backend"], here["backend"]
    asked = {"backend": theirs["name"], **receipt["settings"]}
    for key, value in {"backend": ours["name"], **here["settings"]}.items():
        if asked.get(key) != value:
            raise ReceiptError(
                f"other settings: {key} is {asked.get(key)} in the receipt and {value} here; "
                "replay it where it can be the same"
            )
    for key in ours:
        if theirs.get(key) != ours[key]:
            info(f"note: {key} was {theirs.get(key)} and is {ours[key]} here")
    tokens, params = receipt["tokens"], sampling_of_receipt(receipt)
    if receipt["finish_reason"] == "length":  # also that of a full context
        least = min(params.min_tokens, len(tokens))
        params = replace(params, max_tokens=len(tokens), min_tokens=least)
    got = llm.generate([receipt["prompt"]], params)[0].token_ids
    parts, line = first_difference(tokens, got), f"same text, bit for bit ({len(tokens)} tokens)"
    expected = decoded = ""
    if parts is not None:
        end = parts + _SHOWN_TOKENS
        expected, decoded = (str(llm.tokenizer.decode(ids[parts:end])) for ids in (tokens, got))
        where = f"parts at token {parts + 1} of {len(tokens)}"
        line = f"{where}: {expected!r} in the receipt, {decoded!r} decoded here"
    about = {"same": parts is None, "tokens": len(tokens), "parts": parts}
    return {**about, "expected": expected, "got": decoded}, line


@expand
def replay(
    receipt: str = setting(MISSING, "A receipt, or an answer with one.", flags=("RECEIPT",)),
    model: str | None = setting(
        None, "Folder, file or name of the model.", shown="as the receipt says"
    ),
    threads: int | None = changed(LoadSettings, "threads", None),
    as_json: bool = setting(False, "Print one JSON object a receipt.", flags=("--json",)),
) -> int:
    """Decode an answer again, without drafts, from its receipt: is it the model's text?

    Exits with 0 if it is the same, 1 if it parts, 3 if the receipt was changed or is of other
    weights or settings.
    """
    from paceline.request.receipt import ReceiptError, read_receipts

    parted = False
    try:
        receipts = read_receipts(Path(receipt))
        first = receipts[0]  # those of one answer are of one engine
        wanted = {"backend": first["backend"]["name"], **first["settings"]}
        names = {entry.name for entry in entries(LoadSettings)}
        known: dict[str, Any] = {name: wanted[name] for name in names & wanted.keys()}
        settings = LoadSettings(**known, threads=threads)
        try:
            llm = load_llm(settings, model or first["model"], "none", max_batch_size=1)
        except PacelineError as error:
            raise ReceiptError(f"the receipt's model: {error}") from None
        for record in receipts:
            with stage("decoding again"):
                outcome, line = _replay(llm, record)
            parted |= not outcome["same"]
            if as_json:
                print_json(outcome)
            else:
                print(line)
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    return int(parted)
