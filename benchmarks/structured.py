"""The gain of drafting a grammar's forced tokens: the same requests with and without, in turns.

python benchmarks/structured.py paceline/smollm2 --draft ngram --temperature 1"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from paceline import LLM, Grammar, SamplingParams
from paceline.request.grammar import Matcher

TEXT, COUNT = {"type": "string", "maxLength": 24}, {"type": "integer", "maximum": 999}
BOOLEAN = {"type": "boolean"}


def record(**properties: object) -> dict[str, object]:
    """The schema of an object with exactly these properties."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def one_of(*words: str) -> dict[str, object]:
    return {"enum": list(words)}


def call(name: str, **arguments: object) -> dict[str, object]:
    return record(name={"const": name}, arguments=record(**arguments))


def several(item: object) -> dict[str, object]:
    return {"type": "array", "minItems": 1, "maxItems": 3, "items": item}


DATE = {"type": "string", "pattern": "^2026-(0[1-9]|1[0-2])-[0-3][0-9]$"}
CASES = {
    "weather": (
        call("get_weather", city=TEXT, unit=one_of("celsius", "fahrenheit"), forecast_days=COUNT),
        (
            "How warm will it be in Oslo for the next five days?",
            "Do I need a coat in Chicago tomorrow? In fahrenheit, please.",
            "The weather in Lima this week.",
        ),
    ),
    "calendar": (
        call(
            "create_event",
            title=TEXT,
            start=record(
                date=DATE, hour=COUNT, time_zone=one_of("UTC", "Europe/Berlin", "Asia/Tokyo")
            ),
            duration_minutes=COUNT,
            attendees=several(record(name=TEXT, optional=BOOLEAN)),
            visibility=one_of("public", "private", "confidential"),
        ),
        (
            "Lunch with Maria and Tom on the third of June at noon, Berlin time.",
            "A private call with the dentist on 12 May, 9 o'clock, half an hour.",
            "Plan the quarterly review with Kenji in Tokyo on the first of October.",
        ),
    ),
    "search": (
        call(
            "search_documents",
            query=TEXT,
            filters=record(
                language=one_of("english", "german", "french"),
                published_after=DATE,
                document_type=one_of("article", "report", "presentation"),
            ),
            max_results=COUNT,
            sort_by=one_of("relevance", "publication_date"),
            include_archived=BOOLEAN,
        ),
        (
            "Find ten recent English reports on solar energy.",
            "German articles about railways since March, the newest first.",
            "Any presentation on hiring? Look into the archive, too.",
        ),
    ),
    "order": (
        record(
            order_number=COUNT,
            customer=record(full_name=TEXT, email=TEXT),
            items=several(record(product=TEXT, quantity=COUNT, gift_wrap=BOOLEAN)),
            shipping_address=record(street=TEXT, city=TEXT, country_code=one_of("US", "DE", "JP")),
        ),
        (
            "Anna Schmidt from Hamburg buys three pens and a lamp.",
            "Order 17: two books for John Miller, 5 Main Street, Boston. Wrap them.",
            "Yuki in Osaka wants one bicycle and two helmets.",
        ),
    ),
    "ticket": (
        record(
            category=one_of("billing", "technical_problem", "account_access", "other"),
            priority=one_of("low", "normal", "urgent"),
            sentiment=one_of("positive", "neutral", "negative"),
            affected_product=record(product_name=TEXT, software_version=TEXT),
            customer_account_number=COUNT,
            needs_human_agent=BOOLEAN,
            short_summary=TEXT,
        ),
        (
            "I was charged twice for Notes 4.2! Account 311. I want my money back today.",
            "Thanks for the update of Maps. One question: where did the night mode go?",
            "I cannot log in to Mail since yesterday, my account is 87.",
        ),
    ),
}


def forced_tokens(matcher: Matcher, tokens: Sequence[int]) -> int:
    """How many of a text's tokens are forced by its grammar."""
    count = position = 0
    while position < len(tokens):
        pairs = zip(matcher.forced_tokens(), tokens[position:], strict=False)
        matching = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        if matching is None:
            matching = min(len(matcher.forced_tokens()), len(tokens) - position)
        matcher.consume(tokens[position : position + max(matching, 1)])
        position, count = position + max(matching, 1), count + matching
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    original = Matcher.forced_tokens
    methods = {False: lambda *_: (), True: original}
    engines = {forced: LLM(args.model, draft=args.draft) for forced in methods}
    compiler = engines[True]._grammars
    total = dict.fromkeys(methods, 0.0)
    gains = {}
    for case, (schema, questions) in CASES.items():
        seconds, steps = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
        tokens = forced_count = 0
        system = "Answer in JSON that fits this schema: " + json.dumps(schema)
        for seed, question in enumerate(questions):
            grammar = Grammar.json(schema)
            sampled = {"temperature": args.temperature, "seed": seed}
            params = SamplingParams(grammar=grammar, max_tokens=200, **sampled)
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            texts = []
            for forced in sorted(methods, reverse=bool(seed % 2)):
                Matcher.forced_tokens = methods[forced]  # type: ignore[method-assign,assignment]
                (done,) = engines[forced].chat(chat, params)
                seconds[forced] += done.stats.arrivals[-1][0] - done.stats.arrivals[0][0]
                steps[forced] += done.stats.target_steps
                texts.append(done.token_ids)
            assert texts[0] == texts[1], f"{case}: the texts differ"
            Matcher.forced_tokens = original  # type: ignore[method-assign]
            tokens += len(done.token_ids)
            forced_count += forced_tokens(compiler.matcher(grammar), done.token_ids)
        for forced in methods:
            total[forced] += seconds[forced]
        gains[case] = {
            "speedup": round(seconds[False] / seconds[True], 2),
            "forced": round(forced_count / tokens, 2),
            "tokens": tokens,
            "steps": [*steps.values()],
            "ms_per_token": [round(1e3 * s / tokens, 2) for s in seconds.values()],
        }
    print(json.dumps({**gains, "all": round(total[False] / total[True], 2)}))


if __name__ == "__main__":
    main()
