"""Running servers with OpenAI's API compared: Paceline's own and those of other engines.

    paceline serve --port 8000 &  llama-server -m model.gguf --port 8080 &
    python benchmarks/servers.py http://127.0.0.1:8000 http://127.0.0.1:8080 --concurrency 1,8

Every server gets the shipped prompts as chats over the same client, greedily, and in every round
other ones, since a server may remember its answers (Paceline does); there are 64 of them. The
servers take turns in rotated order, so start them with the same number of threads: a server that
waits uses none. A figure is the median over the rounds. ``first token`` lasts from sending a
request to its first text. ``same`` counts the answers whose text equals those of the first server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from measuring import alternate, finish, numbers
from paceline.lab.bench.prompts import interleave, load_prompts


async def ask(client: AsyncOpenAI, model: str, prompt: str, tokens: int) -> tuple[str, int, float]:
    """The text of one streamed answer, its tokens, and the seconds until its first text."""
    start, first, parts, count = time.perf_counter(), 0.0, list[str](), 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},  # where a server knows it
    )
    async for chunk in stream:
        text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        first = first or (time.perf_counter() - start if text else 0.0)
        parts.append(text)
        count = chunk.usage.completion_tokens if chunk.usage else count
    return "".join(parts), count, first


async def measure(url: str, prompts: list[str], tokens: int, concurrency: int) -> dict[str, Any]:
    """All answers of a server, and its tokens per second."""
    async with AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id
        limit, start = asyncio.Semaphore(concurrency), time.perf_counter()

        async def one(prompt: str) -> tuple[str, int, float]:
            async with limit:
                return await ask(client, model, prompt, tokens)

        texts, counts, firsts = zip(*await asyncio.gather(*map(one, prompts)), strict=True)
    seconds = time.perf_counter() - start
    if not all(counts):
        raise SystemExit(f"error: {url} reports no usage.completion_tokens; it cannot be measured")
    speed = sum(counts) / seconds
    return {"texts": texts, "tokens_per_second": speed, "first": statistics.median(firsts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+", metavar="URL", help="as http://HOST:PORT, without /v1")
    parser.add_argument("--concurrency", type=numbers, default=[1], help="as 1,8")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the record there, too")
    options = parser.parse_args()
    prompts = [prompt.text for prompt in interleave(load_prompts(), lambda p: p.category)]
    last: dict[tuple[str, int], dict[str, Any]] = {}
    counts, rounds = options.concurrency, Counter[tuple[str, int]]()

    def run(url: str, concurrency: int) -> float:
        turn = rounds[url, concurrency] * len(counts) + counts.index(concurrency)
        rounds[url, concurrency] += 1
        start = turn * options.num_prompts
        asked = list(islice(cycle(prompts), start, start + options.num_prompts))
        try:
            figures = asyncio.run(measure(url, asked, options.max_tokens, concurrency))
        except OpenAIError as error:
            raise SystemExit(f"error: {url}: {error}; start the server first") from None
        last[url, concurrency] = figures
        return float(figures["tokens_per_second"])

    pairs = [(url, count) for count in counts for url in options.urls]
    runs: dict[tuple[str, int], Callable[[], float]] = {pair: partial(run, *pair) for pair in pairs}
    records = []
    for (url, count), speeds in alternate(runs, options.rounds).items():
        ours, expected = last[url, count], last[options.urls[0], count]["texts"]
        same = sum(a == b for a, b in zip(ours["texts"], expected, strict=True))
        record = {"url": url, "concurrency": count, "tokens_per_second": statistics.median(speeds)}
        records.append({**record, "rounds": speeds, "first": ours["first"], "same": same})
        print(
            f"{url:32} {count:3} at once {statistics.median(speeds):8.1f} tokens/s "
            f"({min(speeds):.1f} to {max(speeds):.1f})  first token {1000 * ours['first']:.0f} ms  "
            f"same {same} of {len(expected)}"
        )
    finish({"servers": records}, options.json)


if __name__ == "__main__":
    main()
