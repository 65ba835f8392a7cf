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
_WAYS = {
    "intersection": "the draft speaks in the tokens that both have",
    "string": "drafts are re-tokenised as text",
}


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
        text = (
            f"differing: {differences(ours, theirs) or 'nothing, but vocab is set'}; shared tokens "
            f"cover {match.share:.0%} of text, so {_WAYS[match.method]}"
        )
        yield finding("vocabulary-differs", "pair", text)
    if draft.tokenizer is None:
        return
    mine, other = _pipeline(ours), _pipeline(theirs)
    parts = [part for part in mine if mine[part] != other[part]] if match is None else []
    if parts:
        text = f"the tokenizers differ in {' and '.join(parts)}"
        yield finding("segmentation-differs", "pair", text)
    roles = [role for role in _ROLES if getattr(ours, role) != getattr(theirs, role)]
    if roles:
        # Nothing is padded here, but another padding token hints at another tuning.
        severity = NOTE if roles == ["pad_token"] else None
        pairs = (f"{r} {getattr(ours, r)!r} against {getattr(theirs, r)!r}" for r in roles)
        text = f"target against draft: {', '.join(pairs)}"
        yield finding("special-tokens-differ", "pair", text, severity)
    if ours.chat_template is not None and ours.chat_template != theirs.chat_template:
        what = "none" if theirs.chat_template is None else "another"
        text = f"the target has a chat template, the draft has {what}"
        yield finding("chat-template-differs", "pair", text)


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides how text is cut up, but for the vocabulary."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = whole.get("model", {}).get("merges") or []
    return {
        # Written as "a b" or as ["a", "b"].
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "normalizer": whole.get("normalizer"),
        "pre-tokenizer": whole.get("pre_tokenizer"),
    }
