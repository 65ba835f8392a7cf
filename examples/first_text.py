"""The first text: load a model, write, and see that speculation changed nothing but the time.

    python examples/first_text.py [MODEL]

MODEL is a folder, a GGUF file or a hub name; without it the toy that is part of the package. For a
real one: `paceline pull smollm2`, then `python examples/first_text.py paceline/smollm2`.
"""

import sys

from paceline import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "paceline/tiny"
prompt = "Once upon a time, there was a little"
params = SamplingParams(max_tokens=60)  # greedy, as no temperature is given

# Drafts are "auto" unless you say otherwise: lookups in the text, heads that were trained for the
# model, its own 4-bit copy. The controller decides in every step which of them pays.
llm = LLM(model)
(fast,) = llm.generate(prompt, params)
print(prompt + fast.text)
print(f"{len(fast.token_ids)} tokens in {fast.stats.target_steps} forwards of the target")

# The same weights without drafts: `with_draft` loads no model. On our kernels the texts are equal
# bit for bit. Where torch runs the forwards (`paceline doctor` says which), a tie may turn in bf16.
(plain,) = llm.with_draft(draft="none").generate(prompt, params)
assert fast.token_ids == plain.token_ids
print(f"without drafts the same text, in {plain.stats.target_steps} forwards")
