"""Spans as the verifier gets them."""

from __future__ import annotations

from paceline.core.batch import Span
from paceline.core.sequence import SequenceState, SequenceView
from paceline.core.tree import TokenTree


def judged(seq: SequenceState | SequenceView, row: int, tree: TokenTree) -> Span:
    """The draft of a sequence, whose rows of logits begin at ``row``."""
    view = seq.view() if isinstance(seq, SequenceState) else seq
    return Span.of_request(view, tree).placed(0, row)
