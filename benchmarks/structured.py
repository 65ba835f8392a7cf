"""What drafting a grammar's forced tokens gains: the same requests with it and without, by turns.

python benchmarks/structured.py paceline/smollm2 --draft ngram --temperature 1
"""

from __future__ import annotations

import argparse
import json
import time

from paceline import LLM, Grammar, SamplingParams
from paceline.request.grammar import Matcher

TEXT, COUNT = {"type": "string", "maxLength": 16}, {"type": "integer", "maximum": 99}


def record(**properties: object) -> dict[str, object]:
    """A schema of an object that has these and no others."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


ITEMS = {"type": "array", "minItems": 2, "maxItems": 3, "items": record(product=TEXT, number=COUNT)}
CALL = record(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, days=COUNT)
SCHEMAS = {
    "two keys": record(name=TEXT, age=COUNT),
    "tool call": record(name={"const": "get_weather"}, arguments=CALL),
    "order": record(order_id=COUNT, customer=record(name=TEXT, email=TEXT), items=ITEMS),
}
ASKS = ("A person in Paris.", "Weather in Oslo, five days.", "Anna buys three pens and a lamp.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    real = Matcher.forced
    ways = {False: lambda _: (), True: real}
    engines = {forced: LLM(args.model, draft=args.draft) for forced in ways}
    gains = {}
    for name, schema in SCHEMAS.items():
        seconds, steps = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for seed, ask in enumerate(ASKS * 2):
            sampled = {"temperature": args.temperature, "seed": seed}
            params = SamplingParams(grammar=Grammar.json(schema), max_tokens=160, **sampled)
            texts = []
            for forced in sorted(ways, reverse=bool(seed % 2)):
                Matcher.forced = ways[forced]  # type: ignore[method-assign,assignment]
                began = time.perf_counter()
                (done,) = engines[forced].generate([f"{ask} Answer in JSON: "], params)
                seconds[forced] += time.perf_counter() - began
                steps[forced] += done.stats.target_steps
                texts.append(done.token_ids)
            assert texts[0] == texts[1], f"{name}: another text"
        gains[name] = {"speedup": seconds[False] / seconds[True], "steps": [*steps.values()]}
    print(json.dumps(gains))


if __name__ == "__main__":
    main()
