"""A drafter in a package of its own: the line that is being written is the last one again."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import LLM, SamplingParams
from paceline.drafters import DraftSpec, Loading, LookupDrafter, Prepared, Slice


@dataclass(frozen=True, kw_only=True)
class Repeat(DraftSpec):
    """The record: ``repeat:longest=8`` in a spec, ``Repeat(longest=8)`` in Python."""

    kind = "repeat"
    page = "https://example.org/repeat"
    tried = "always"
    examples = ("repeat", "repeat:longest=4")

    longest: int = 16

    def prepare(self, loading: Loading) -> Prepared:
        ends = set(loading.tokenizer.encode("\n", add_special_tokens=False))
        return Prepared(lambda context: RepeatDrafter(context.target.device, self.longest, ends))


class RepeatDrafter(LookupDrafter):
    name = "repeat"

    def __init__(self, device: object, longest: int, ends: set[int]) -> None:
        super().__init__(device)
        self.longest, self.ends = longest, ends

    def guess(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        tokens = list(item.seq.tokens)
        breaks = [index for index, token in enumerate(tokens) if token in self.ends]
        length = min(item.draft_length, self.longest)
        again = breaks[-2] + len(tokens) - breaks[-1] if len(breaks) > 1 else len(tokens)
        chain = tokens[again:][:length]
        return chain, range(-1, len(chain) - 1)


if __name__ == "__main__":
    # As an object it needs no package. Installed (`pip install ./examples`) it is a kind like the
    # built-in ones: `paceline generate ... --draft repeat:longest=8`.
    llm = LLM("paceline/tiny", draft=Repeat(longest=8))
    (lines,) = llm.generate("a = 1\n" * 6, SamplingParams(max_tokens=40))
    print(lines.text)
    print(f"{lines.stats.accepted_tokens} of {lines.stats.drafted_tokens} drafts were accepted")
