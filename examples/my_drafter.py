"""A drafter in a package of its own. It assumes that the current line repeats the previous one."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import LLM, SamplingParams
from paceline.drafters import DraftSpec, LoadContext, LookupDrafter, PreparedDraft, Slice


@dataclass(frozen=True, kw_only=True)
class Repeat(DraftSpec):
    """The record of the kind; its fields are the options. Users write ``Repeat(longest=8)`` in
    Python, or the spec ``repeat:longest=8``."""

    kind = "repeat"
    page = "https://example.org/repeat"
    tune_tries = "always"  # `paceline tune` tries it without being asked
    examples = ("repeat", "repeat:longest=4")  # specs that tests decode with

    longest: int = 16

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        """Load what the drafter needs: here the ids of line breaks."""
        breaks = set(loading.tokenizer.encode("\n", add_special_tokens=False))
        return PreparedDraft(
            lambda context: RepeatDrafter(context.target.device, self.longest, breaks)
        )


class RepeatDrafter(LookupDrafter):
    """Drafts the rest of the previous line, from the current column on."""

    name = "repeat"

    def __init__(self, device: object, longest: int, breaks: set[int]) -> None:
        super().__init__(device)
        self.longest, self.breaks = longest, breaks

    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        """The drafted tokens, and the index of each one's parent among them."""
        tokens = list(item.seq.tokens)
        ends = [index for index, token in enumerate(tokens) if token in self.breaks]
        if len(ends) < 2:
            return (), ()  # no draft
        column = len(tokens) - ends[-1]
        length = min(item.draft_length, self.longest)
        chain = tokens[ends[-2] + column :][:length]
        return chain, range(-1, len(chain) - 1)  # in a chain, each token's parent is the one before


if __name__ == "__main__":
    # A record works without a package. Once the package is installed (`pip install ./examples`),
    # the kind works like a built-in one: `paceline generate ... --draft repeat:longest=8`.
    llm = LLM("paceline/tiny", draft=Repeat(longest=8))
    (lines,) = llm.generate("a = 1\n" * 6, SamplingParams(max_tokens=40))
    print(lines.text)
    print(f"{lines.stats.accepted_tokens} of {lines.stats.drafted_tokens} drafts were accepted")
