"""A conversation in a terminal, as short as it can be. (`paceline chat` is the comfortable one.)

    python examples/chat.py [MODEL]

An empty line or Ctrl-D ends it. The toy knows a few hundred words; paceline/smollm2 says more.
"""

import sys

from paceline import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "paceline/tiny")
messages = []
while True:
    try:
        question = input("you: ")
    except EOFError:
        break
    if not question:
        break
    messages.append({"role": "user", "content": question})

    # The whole conversation goes through the model's chat template each time. What the engine has
    # read before is still in its cache (prefix sharing), so only the new turn costs anything.
    prompt = llm.render_chat(messages)
    answer = ""
    for event in llm.stream([prompt], SamplingParams(max_tokens=120)):
        print(event.text, end="", flush=True)  # one token or several: those of one step
        answer += event.text
    print()
    messages.append({"role": "assistant", "content": answer})
