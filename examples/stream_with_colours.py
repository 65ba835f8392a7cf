"""A stream in which you see who wrote what: drafted tokens green, the target's own bold.

    python examples/stream_with_colours.py [MODEL]

Each step brings the drafted tokens that the target accepted and then one of its own. Long green
runs are what speculation gains.
"""

import sys
from itertools import groupby

from paceline import LLM, SamplingParams

GREEN, BOLD, PLAIN = "\033[32m", "\033[1m", "\033[0m"

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "paceline/tiny")
prompt = "12 + 30 = 42. 12 + 31 = 43. 12 + 32 = 44. 12 + 33 ="
print(prompt, end="")
for event in llm.stream(prompt, SamplingParams(max_tokens=60)):
    pairs = zip(event.from_draft, event.token_ids, strict=True)
    for drafted, run in groupby(pairs, key=lambda pair: pair[0]):
        # Decoding run by run is enough for English. A character of several tokens (an emoji) may
        # be cut; `event.text` never is.
        text = llm.tokenizer.decode([token for _, token in run], skip_special_tokens=True)
        print(f"{GREEN if drafted else BOLD}{text}{PLAIN}", end="", flush=True)
    if event.completion is not None:
        stats = event.completion.stats
        print(f"\n{stats.mean_accepted_length:.2f} tokens per step, by drafter {stats.drafters}")
