"""A server, asked by the `openai` package: an answer, a stream, JSON by a schema, and the drafts.

    pip install openai
    python examples/openai_client.py [MODEL]

It starts `paceline serve` by itself. With a server that runs already only `base_url` matters.
"""

import json
import sys

from openai import OpenAI

from local_server import paceline_serve

model = sys.argv[1] if len(sys.argv) > 1 else "paceline/tiny"
question = [{"role": "user", "content": "What is 12 + 30?"}]

with paceline_serve(model) as address:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")

    answer = client.chat.completions.create(model=model, messages=question, max_tokens=40)
    print("whole: ", answer.choices[0].message.content)

    # `speculation` is our one field: whether a request drafts, who, how far. The text stays the
    # same, so it is safe to compare.
    plainly = {"speculation": {"drafter": "none"}}
    stream = client.chat.completions.create(
        model=model, messages=question, max_tokens=40, stream=True, extra_body=plainly
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    print("stream:", "".join(pieces))
    assert "".join(pieces) == answer.choices[0].message.content

    # A schema holds whatever the model would rather say, also under drafts.
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"enum": [3, 5, 7]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    shaped = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Make up a child."}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "child", "schema": schema}},
    )
    print("schema:", json.loads(shaped.choices[0].message.content))
