"""Whether two models mean the same by the same ids: vocabularies, special tokens, templates."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerFast

from paceline.draft.vocabulary.matching import match_vocabularies
from paceline.errors import VocabularyMismatchError
from paceline.lab.doctor.findings import NOTE, Finding, finding, parted
from paceline.lab.doctor.models import Model
from paceline.model.vocabulary import differences

_ROLES = ("bos_token", "eos_token", "pad_token")


def compare(target: Model, draft: Model, method: str = "auto") -> Iterator[Finding]:
    """What the engine would make of the pair. ``method``: the draft spec's ``vocab`` option."""
    ours, theirs = target.tokenizer, draft.tokenizer or target.tokenizer
    if ours is None or theirs is None:
        return
    logger = logging.getLogger("paceline.draft.vocabulary")
    try:
        with ExitStack() as after:
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)  # what it would log is a finding here
            match = match_vocabularies(target, draft, ours, theirs, method)
    except VocabularyMismatchError as error:
        problem, cure = parted(error)
        yield finding("vocabulary-refused", "pair", problem, cure=cure)
        return
    if match is None:
        count = len(ours.get_vocab())
        text = f"all {count:,} ids mean the same tokens; draft tokens are used as they are"
        yield finding("vocabulary-same", "pair", text)
        if target.vocab_size != draft.vocab_size:
            rows = f"{target.vocab_size:,} against the draft's {draft.vocab_size:,}"
            yield finding("vocabulary-padded", "pair", f"rows of logits differ: {rows}")
    else:
        way = {
            "intersection": "the draft speaks in the tokens that both have",
            "string": "drafts are re-tokenised as text",
        }[match.method]
        text = (
            f"differing: {differences(ours, theirs) or 'nothing, but vocab is set'}; "
            f"shared tokens cover {100 * match.share:.0f} % of text, so {way}"
        )
        yield finding("vocabulary-differs", "pair", text)
    if draft.tokenizer is not None:
        if match is None:
            yield from _segmentation(ours, theirs)
        yield from _formats(ours, theirs)


def _segmentation(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast
) -> Iterator[Finding]:
    """The same ids, but text cut up in another way."""
    mine, other = _pipeline(ours), _pipeline(theirs)
    differing = [part for part in mine if mine[part] != other[part]]
    if not differing:
        return
    text = f"the tokenizers differ in {' and '.join(differing)}"
    if "merges" in differing:
        pairs = enumerate(zip(mine["merges"], other["merges"], strict=False))
        first = next((number for number, (a, b) in pairs if a != b), None)
        text += f" ({len(mine['merges'])} against {len(other['merges'])}"
        text += ")" if first is None else f", the first other one at place {first})"
    yield finding("segmentation-differs", "pair", text)


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = whole.get("model", {}).get("merges") or []
    return {
        # Written as "a b" or as ["a", "b"].
        "merges": [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in merges],
        "normalizer": whole.get("normalizer"),
        "pre-tokenizer": whole.get("pre_tokenizer"),
    }


def _formats(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> Iterator[Finding]:
    """Special tokens and chat templates."""
    differing = {
        role: f"{role} {getattr(ours, role)!r} against {getattr(theirs, role)!r}"
        for role in _ROLES
        if getattr(ours, role) != getattr(theirs, role)
    }
    if differing:
        # Nothing is padded here, but another padding token hints at another tuning.
        severity = NOTE if list(differing) == ["pad_token"] else None
        text = f"target against draft: {', '.join(differing.values())}"
        yield finding("special-tokens-differ", "pair", text, severity)
    mine, other = ours.chat_template, theirs.chat_template
    if mine is not None and mine != other:
        what = "none" if other is None else f"another one ({len(str(other))} characters)"
        text = f"the target has a chat template of {len(str(mine))} characters, the draft {what}"
        yield finding("chat-template-differs", "pair", text)
