"""Speculative decoding: draft, verify in one forward, accept, commit.

One text and chains of a small model. Engine.step does the same for batches, trees and all drafters.
"""

import torch

from paceline import SamplingParams
from paceline.core.batch import Span
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer
from paceline.verify.verifier import Verifier


class Reader:
    """A model, and the keys and values of what it has read."""

    def __init__(self, model, prompt, params):
        self.model, self.cache = model, model.new_cache(32, block_size=16, share=False)
        self.seq = SequenceState(1, prompt, len(prompt), params, model.eos_token_ids)
        self.cache.admit(1, prompt)

    @torch.inference_mode()
    def read(self, tree):
        """One forward: logits after the last committed token and after each node of the tree."""
        seq = self.seq
        self.cache.reserve(1, len(seq.tokens) + len(tree))
        batch = self.cache.batch_of([Span.of_request(seq.view(), tree)])
        return self.model(batch, self.cache).logits, batch.spans

    def commit(self, tokens, cached):
        """The text so far, of which so many tokens stay in the cache."""
        self.seq.tokens, self.seq.cached = list(tokens), cached
        self.cache.commit(1, self.seq.tokens, cached)


def decode(target, draft, length):
    """The tokens of each step: accepted ones, then one of the target's own. 0 is plain decoding."""
    text, guess, end = target.seq, draft.seq, None
    while end is None:
        for _ in range(min(length, text.remaining - 1)):  # draft
            logits, _ = draft.read(TokenTree.empty())
            token = int(logits[-1].argmax())
            draft.commit([*guess.tokens, token], len(guess.tokens))
        tree = TokenTree.chain(guess.tokens[len(text.tokens) :])
        logits, spans = target.read(tree)  # verify
        (verdict,) = Verifier()(logits, spans)  # accept
        kept, end = text.check_stop(verdict.tokens, text.remaining)
        cached = len(text.tokens) + len(verdict.path)
        target.commit(text.tokens + list(verdict.tokens[:kept]), cached)  # commit
        draft.commit(text.tokens, min(guess.cached, cached))
        yield verdict.tokens[:kept]


if __name__ == "__main__":
    names = "paceline/tiny", "paceline/tiny-draft"
    models = [CausalModel.load(name, dtype="float32") for name in names]
    tokenizer, params = load_tokenizer(names[0]), SamplingParams(max_tokens=60)
    prompt = tokenizer.encode("Once upon a time, there was a little")
    plain, quick = (
        list(decode(*(Reader(model, prompt, params) for model in models), length))
        for length in (0, 4)
    )
    for tokens in quick:
        print(len(tokens), repr(tokenizer.decode(tokens)))
    assert sum(quick, ()) == sum(plain, ()), "not the text of plain decoding"
    print(f"the text of plain decoding, in {len(quick)} target steps instead of {len(plain)}")
