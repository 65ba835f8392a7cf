"""``paceline replay``: decodes again, without drafts, what a receipt says was decoded."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from paceline.cli.options import expand, load_llm
from paceline.cli.output import print_json
from paceline.core.stages import stage
from paceline.errors import PacelineError
from paceline.settings import LoadSettings, changed, entries, setting

NOT_COMPARABLE = 3


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
        from paceline.lab.replay import replay as decode_again

        for record in receipts:
            with stage("decoding again"):
                outcome, line = decode_again(llm, record)
            parted |= not outcome["same"]
            if as_json:
                print_json(outcome)
            else:
                print(line)
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    return int(parted)
