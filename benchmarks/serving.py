"""Serving: with speculation and without, and the cost of HTTP relative to calling the engine.

A server (`paceline serve`) and one `LLM` in this process, with the same pair, take turns.
`--processes both` measures a server of two processes and one of a single process
(`--single-process`) in the same rounds. Every cell is a closed loop: N clients, each of which sends
its next request when the last one is answered, all with the same prompts, token counts and batch
limit. Every request is streamed, and gets exactly `--max-tokens` tokens, greedily.

    python benchmarks/serving.py
    python benchmarks/serving.py --quick --json serving.json
    python benchmarks/serving.py --processes both --concurrency 16
    python benchmarks/serving.py --model paceline/smollm2 --draft auto --concurrency 1,4,16

Throughput rounds read streams as raw bytes. Latencies come from another round, in which every chunk
lists its tokens: time to first token lasts from sending a request to its first chunk with tokens,
inter-token latency is the time between two chunks divided by the tokens of the later one.
The last line of the output is one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console
from rich.progress import track

from measuring import alternate, finish, median_ratio, numbers
from paceline import LLM, SamplingParams
from paceline.engine.driver import Drive
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.bench.result import machine_of, percentile
from paceline.lab.report.document import Column, Report, milliseconds, number, table_of, times
from paceline.lab.report.render import print_report

SERVED = "bench"  # the model's name over HTTP
WAYS = ("auto", "none")  # with the default drafter, and without
ENGINE = "engine"  # an LLM in this process, without a server
SPEEDS = (
    Column("clients", "clients"),
    Column("processes", "processes"),
    Column("off_tokens_per_second", "off, tok/s", shown="{:.0f}".format),
    Column("on_tokens_per_second", "on, tok/s", shown="{:.0f}".format),
    Column("speedup", "speedup", shown=times),
    Column("off_by_engine", "off by engine", shown=number),
    Column("on_by_engine", "on by engine", shown=number),
)
LATENCIES = (
    Column("clients", "clients"),
    Column("processes", "processes"),
    Column("speculation", "speculation"),
    Column("first_p50", "first token p50 ms", shown=milliseconds),
    Column("first_p99", "p99", shown=milliseconds),
    Column("inter_token_p50", "inter-token p50 ms", shown=milliseconds),
    Column("inter_token_p99", "p99", shown=milliseconds),
)


@dataclass(frozen=True)
class Work:
    """The prompts, the tokens per answer, and the models."""

    prompts: list[str]
    max_tokens: int
    model: str
    draft: str

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.max_tokens

    def body(self, prompt: str, way: str, tokens: bool) -> bytes:
        return json.dumps(
            {
                "model": SERVED,
                "prompt": prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "speculation": {"drafter": way, "tokens": tokens},
            }
        ).encode()


def work_of(args: argparse.Namespace) -> Work:
    """The work of every cell: prompts of eight categories."""
    texts = [prompt.text for prompt in load_prompts(per_category=2 if args.quick else 4)]
    return Work(texts, args.max_tokens, args.model, args.draft)


@dataclass
class Latencies:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # one per token


async def request(port: int, body: bytes, latencies: Latencies | None) -> None:
    """Send one streamed request over a new connection and read its answer."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"error: the server answered {status.decode().strip()}")
    if latencies is None:
        rest = await reader.read()
        assert b"data: [DONE]" in rest, rest[-300:]
        writer.close()
        return
    before = None
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        count = len(json.loads(line[6:])["choices"][0].get("tokens") or ())
        if not count:  # the last chunk may have only a finish reason
            continue
        if before is None:
            latencies.first.append(now - start)
        else:
            latencies.gaps.extend([(now - before) / count] * count)
        before = now
    writer.close()


async def clients(port: int, count: int, bodies: list[bytes], latencies: Latencies | None) -> float:
    """Seconds until ``count`` clients have got answers to all ``bodies``."""
    waiting = deque(bodies)

    async def client() -> None:
        while waiting:
            await request(port, waiting.popleft(), latencies)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(count)))
    return time.perf_counter() - start


def over_http(
    port: int, count: int, work: Work, way: str, latencies: Latencies | None = None
) -> float:
    bodies = [work.body(prompt, way, latencies is not None) for prompt in work.prompts]
    return asyncio.run(clients(port, count, bodies, latencies))


@contextmanager
def server(kind: str, batch: int, threads: int, work: Work) -> Iterator[int]:
    """Start a server; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", work.model]
    command += ["--draft", work.draft]
    command += ["--port", str(port), "--max-batch-size", str(batch), "--threads", str(threads)]
    command += ["--log-level", "warning", "--served-model-name", SERVED]
    if kind == "one":
        command.append("--single-process")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("error: the server did not start") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def directly(llm: LLM, count: int, work: Work, way: str) -> float:
    """Seconds of the same closed loop on the engine itself, including tokenisation."""
    drafter = None if way == "auto" else "none"
    params = SamplingParams(
        max_tokens=work.max_tokens, ignore_eos=True, drafter=drafter, temperature=0.0
    )
    start = time.perf_counter()
    prepared = [llm.prepare(prompt, params, streams=False)[0] for prompt in work.prompts]
    requests = {request.seq.seq_id: request for request in prepared}
    with Drive(llm.engine, [request.seq for request in prepared], count) as drive:
        for step in drive:
            for commit in step.commits:
                requests[commit.seq_id].apply_commit(commit)
    return time.perf_counter() - start


Measured = tuple[str, str]  # a kind of server or the engine, and one of WAYS


@dataclass
class Cell:
    """Tokens per second in each round, and the latencies of the servers."""

    concurrency: int
    rates: dict[Measured, list[float]] = field(default_factory=dict)
    latencies: dict[Measured, Latencies] = field(default_factory=dict)

    def speeds(self) -> Iterator[dict[str, Any]]:
        """The throughput of each kind of server."""
        for kind in dict.fromkeys(kind for kind, _ in self.rates if kind != ENGINE):
            off, on = self.rates[kind, "none"], self.rates[kind, "auto"]
            yield {
                "clients": self.concurrency,
                "processes": kind,
                "off_tokens_per_second": statistics.median(off),
                "on_tokens_per_second": statistics.median(on),
                "speedup": median_ratio(on, off),
                "off_by_engine": median_ratio(off, self.rates[ENGINE, "none"]),
                "on_by_engine": median_ratio(on, self.rates[ENGINE, "auto"]),
            }

    def times(self) -> Iterator[dict[str, Any]]:
        """Latencies in seconds, as measured by the clients."""
        for (kind, way), seen in self.latencies.items():
            by_name = {"first": seen.first, "inter_token": seen.gaps}
            yield {
                "clients": self.concurrency,
                "processes": kind,
                "speculation": way,
                **{
                    f"{name}_p{share}": percentile(values, share / 100)
                    for name, values in by_name.items()
                    for share in (50, 99)
                },
            }


def measure(args: argparse.Namespace, llm: LLM, work: Work) -> list[Cell]:
    cells = [Cell(count) for count in args.concurrency]
    limit = max(args.concurrency)
    kinds = ("two", "one") if args.processes == "both" else (args.processes,)
    with ExitStack() as stack:
        ports = {
            kind: stack.enter_context(server(kind, limit, args.threads, work)) for kind in kinds
        }
        for cell in cells:  # warm up at every concurrency
            short = replace(work, prompts=work.prompts[: cell.concurrency], max_tokens=8)
            for way in WAYS:
                for port in ports.values():
                    over_http(port, cell.concurrency, short, way)
                directly(llm, cell.concurrency, short, way)
        measured = [(kind, way) for kind in (*kinds, ENGINE) for way in WAYS]

        def rate(kind: str, way: str, clients: int) -> float:
            if kind == ENGINE:
                return work.tokens / directly(llm, clients, work, way)
            return work.tokens / over_http(ports[kind], clients, work, way)

        for cell in track(cells, "serving", console=Console(stderr=True), transient=True):
            ways = {
                (kind, way): partial(rate, kind, way, cell.concurrency) for kind, way in measured
            }
            cell.rates = alternate(ways, args.rounds, warm_up=0)
        for cell in cells:
            for kind, port in ports.items():
                for way in WAYS:
                    seen = cell.latencies[kind, way] = Latencies()
                    over_http(port, cell.concurrency, work, way, seen)
    return cells


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two rounds, fewer tokens")
    add("--rounds", type=int)
    add("--max-tokens", type=int)
    add("--concurrency", type=numbers, default=[1, 4, 16], help="as in 1,4,16")
    add("--threads", type=int, default=1, help="of the model, in this process and in servers")
    add("--model", "--target", default="paceline/tiny")
    add("--draft", default="paceline/tiny-draft", help="any draft spec")
    add("--processes", choices=("one", "two", "both"), default="two", help="of the server")
    add("--json", help="file to write the JSON object to")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.max_tokens = args.max_tokens or (32 if args.quick else 64)
    if min(args.rounds, args.max_tokens, args.threads, *args.concurrency) < 1:
        parser.error("all numbers must be at least 1")
    return args


def main() -> None:
    """Measure as the command line says."""
    import torch

    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    work = work_of(args)
    llm = LLM(work.model, draft=work.draft, max_batch_size=max(args.concurrency))
    cells = measure(args, llm, work)
    speeds = [row for cell in cells for row in cell.speeds()]
    latencies = [row for cell in cells for row in cell.times()]
    note = (
        f"{len(work.prompts)} prompts of eight categories, {work.max_tokens} tokens each, greedy; "
        f"medians of {args.rounds} rounds in turns; {args.threads} thread(s) for the model. "
        "At 0.95 of the engine's throughput the server costs a twentieth."
    )
    tables = [
        table_of(speeds, SPEEDS, note, "Throughput, and that of the server relative to the engine"),
        table_of(latencies, LATENCIES, "", "Latency, as measured by the clients"),
    ]
    report = Report("Serving")
    report.add("Serving", *tables)
    print_report(report, Console(width=max(100, Console().width)))
    record = {"speeds": speeds, "latencies": latencies, "threads": args.threads}
    finish(record | {"machine": machine_of(llm)}, args.json)


if __name__ == "__main__":
    main()
