"""Proposals that are followed along the text, whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import TokenTree, children_of


class ShadowDraft:
    """A proposal followed along the text, whoever drafts: how far it would have been right.

    So a costless member is known without being used. The next trial starts when this one has ended,
    as the next draft would.
    """

    def __init__(self, kind: tuple[int, int], tree: TokenTree) -> None:
        self.kind = kind
        self.accepted = 0
        self.ended = False
        self._tree = tree
        self._levels = max(tree.depths, default=0)
        self._tokens: list[int] | None = None
        self._node = -1

    @property
    def reached(self) -> int:
        """Levels of which it is known whether they were right."""
        return min(self.accepted + self.ended, self._levels)

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on with what was committed."""
        if self._tokens is None:
            self._tokens = self._tree.tokens.tolist()
        children = children_of(self._tree.parents)
        for token in tokens:
            below = [c for c in children[self._node + 1] if self._tokens[c] == token]
            if not below:
                break
            self._node = below[0]
            self.accepted += 1
        else:
            self.ended = not children[self._node + 1]
            return
        self.ended = True
