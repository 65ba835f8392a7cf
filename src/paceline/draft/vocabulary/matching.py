"""How a draft with another vocabulary is used: chosen by what the two have in common."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline.draft.vocabulary.shared import Match, TokenTexts, overlap, shared_ids
from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.model.tokenizer import Named, check_embeddings, differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METHODS = ("auto", "intersection", "string")
ENOUGH = 0.5  # from here on token by token: measured, see docs/decisions.md

# What users ask of models: a story, a question with an answer, numbers, code, other languages.
SAMPLE = """\
Once upon a time there was a little girl who lived near the forest with her grandmother. Every
morning she walked to the village, and on the way she greeted the baker, the postman and an old
dog that slept beside the road. "Good morning," she said, "did you sleep well?" But one day
nobody answered, and the street was completely empty.

User: How do plants make their food, and why does that matter for the climate?
Assistant: Plants use photosynthesis: chlorophyll in the leaves absorbs sunlight, and with its
energy carbon dioxide and water become glucose and oxygen. This matters because forests store a
large part of the carbon that people release. In 2019 scientists estimated that about 30% of all
emissions were taken up again by vegetation and soils, although the exact amount is uncertain.

A shop sells 12 boxes with 24 pencils each. If 57 pencils are sold on Monday and 3 times as many
on Tuesday, how many are left? 12 * 24 = 288; 288 - 57 - 171 = 60. The answer is 60.

def average(values: list[float]) -> float:
    \"\"\"Return the arithmetic mean, or 0.0 for an empty list.\"\"\"
    if not values:
        return 0.0
    total = sum(value for value in values)
    return total / len(values)

for index, name in enumerate(["Anna", "Björn", "Chloé"]):
    print(f"{index}: {name.upper()}")

The committee approved the proposal on 14 March 2021. Members asked whether the new protocol would
remain compatible with earlier versions; the authors explained that existing clients continue to
work, but recommended upgrading before the next release. Summary: approved, with two open issues.
"""


def match_vocabularies(
    target: Named,
    draft: Named,
    tokenizer: PreTrainedTokenizerFast,
    draft_tokenizer: PreTrainedTokenizerFast,
    method: str = "auto",
) -> Match | None:
    """None if the ids agree and nothing else is asked for; otherwise how to translate. Raises
    ConfigError on an unknown method, VocabularyMismatchError if no way, or not the one asked for,
    is lossless and sensible."""
    if method not in METHODS:
        raise ConfigError(f"vocab is {method!r}; use one of {', '.join(METHODS)}")
    differing = differences(tokenizer, draft_tokenizer)
    if not differing and method == "auto":
        check_embeddings(draft, len(tokenizer.get_vocab()))
        return None
    ours, theirs = TokenTexts(tokenizer), TokenTexts(draft_tokenizer)
    pairs = {
        a: b
        for a, b in shared_ids(ours, theirs).items()
        if a < target.vocab_size and b < draft.vocab_size
    }
    share = overlap(ours, theirs, pairs, SAMPLE)
    unreadable = [
        f"the tokenizer of {model.name} does not give text back as it was"
        for model, texts in ((target, ours), (draft, theirs))
        if not texts.reads_back(SAMPLE)
    ]
    tokenwise = method == "intersection" or (method == "auto" and share >= ENOUGH)
    if (tokenwise and share == 0) or (not tokenwise and unreadable):
        reasons = [f"shared tokens cover {100 * share:.0f} % of text", *unreadable]
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} differ in {differing or 'nothing'}; "
            f"{', and '.join(reasons)}; use a draft of the same family"
        )
    logging.getLogger("paceline.draft.vocabulary").info(
        "draft %s and target %s differ in %s; shared tokens cover %.0f %% of text",
        draft.name,
        target.name,
        differing,
        100 * share,
    )
    return Match("intersection" if tokenwise else "string", ours, theirs, pairs, share)
