"""Decodes the answer of a receipt again, without drafts, and compares the two texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.core.stages import info
from paceline.lab.certify.decoding import first_difference
from paceline.llm import LLM
from paceline.request.receipt import ReceiptError, sampling_of_receipt

_SHOWN_TOKENS = 8  # of each text, from the first difference on


def replay(llm: LLM, receipt: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Decode a receipt's answer with plain decoding. Returns the outcome as JSON (``parts``: index
    of the first differing token, None if there is none; ``text``: the receipt's text; ``expected``
    and ``got``: the receipt's and the new text from there on), and as a line. Raises ReceiptError
    if weights, tokenizer or settings are not the receipt's."""
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
                "replay it where this setting can be the same"
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
    text = str(llm.tokenizer.decode(tokens))
    about = {"same": parts is None, "tokens": len(tokens), "text": text, "parts": parts}
    return {**about, "expected": expected, "got": decoded}, line
