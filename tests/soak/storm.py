"""Clients that do whatever clients do, for a while; then the server is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from soak import hostile
from soak.answers import Answer
from soak.client import PATIENCE, Connection, fetch
from soak.judge import Judge
from soak.processes import Held, held
from soak.requests import ClientRequest, Server, client_requests, extreme, free, invalid
from support.served_process import ServedProcess

_HUNG_UP = (ConnectionError, EOFError, asyncio.IncompleteReadError)
# Of the engine, after PATIENCE seconds: a full queue of the longest answers takes some 1,300.
_MOST_STEPS = 2000


@dataclass(frozen=True)
class Plan:
    """``seed`` decides everything but the order in which the server gets to it."""

    seed: str
    seconds: float
    clients: int = 32
    skip: frozenset[str] = frozenset()
    round_seconds: float = 300.0


@dataclass
class Storm:
    """The clients of one server."""

    plan: Plan
    process: ServedProcess
    say: Callable[[str], None]
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(say=self.say)

    @property
    def port(self) -> int:
        return self.process.port

    async def run(self) -> Judge:
        """A short round first: what the server then holds is what it may hold at the end."""
        server = await self.look()
        first = min(0.2 * self.plan.seconds, 60.0)
        rest = self.plan.seconds - first
        others = max(1, round(rest / self.plan.round_seconds))
        rounds = [first, *[rest / others] * others]  # each with requests of its own
        idle: list[Held] = []
        for number, seconds in enumerate(rounds):
            pool = client_requests(
                f"{self.plan.seed}/{number}", int(20 + min(seconds, 200)), server
            )
            await self.round(number, seconds, pool, server)
            if not await self.settle():
                break
            await self.alone(pool)
            idle.append(held(self.process.process.pid))
            self.judge.settled(await self.metric("cache_usage_ratio"))
            self.say(f"round {number} done: {idle[-1]}; {self.judge.counts['findings']} findings")
        self.judge.flat(idle)
        await self.healthy("at the end")
        return self.judge

    async def look(self) -> Server:
        """What the server says of itself."""
        _, body = await fetch(self.port, "GET", "/v1/models")
        (card,) = json.loads(body)["data"]
        texts = "The old king said: Zürich, 日本語 🙂! def add(a, b): return 12 + 30. A dog ran."
        _, body = await fetch(self.port, "POST", "/tokenize", {"prompt": texts})
        ids = tuple(dict.fromkeys(json.loads(body)["tokens"]))
        return Server(card["id"], tuple(card["drafters"]), ids, card["max_model_len"])

    async def round(
        self, number: int, seconds: float, pool: list[ClientRequest], server: Server
    ) -> None:
        end = time.monotonic() + seconds
        clients = [
            self.client(f"{self.plan.seed}/{number}/{client}", end, pool, server)
            for client in range(self.plan.clients)
        ]
        await asyncio.gather(self.watch(end), *clients)

    async def client(
        self, seed: str, end: float, pool: list[ClientRequest], server: Server
    ) -> None:
        """One act after the other; which ones, the seed says."""
        acts = {name: act for name, act in ACTS.items() if name not in self.plan.skip}
        weights = [act.weight for act in acts.values()]
        for number in count():
            if time.monotonic() >= end or self.process.process.poll() is not None:
                return
            chooser = random.Random(f"{seed}/{number}")
            (name,) = chooser.choices(list(acts), weights)
            try:
                await self.patiently(acts[name].do(self, chooser, pool, server))
            except asyncio.TimeoutError as error:
                self.judge.complain(f"{name}: no answer, and {error}")
            except _HUNG_UP as error:
                if name not in ("hostile", "cancel"):
                    self.judge.complain(f"{name}: the server hung up ({error!r})")
                await asyncio.sleep(0.2)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                self.judge.complain(f"{name}: an answer that is none ({error!r})")
            if self.judge.counts["queue full"]:
                await asyncio.sleep(0.02)

    async def patiently(self, act: Coroutine[Any, Any, None]) -> None:
        """Wait for an act. Raises TimeoutError if it hangs: the engine no longer works, or has done
        more than any queue of requests takes. On a loaded machine a step may take seconds."""
        task, steps = asyncio.ensure_future(act), list[float]()
        try:
            while not (await asyncio.wait({task}, timeout=PATIENCE))[0]:
                steps.append(await self.metric("batch_size_count"))
                taken = steps[-1] - steps[0]
                if steps[-2:-1] == steps[-1:] or taken > _MOST_STEPS:
                    seconds = PATIENCE * len(steps)
                    raise asyncio.TimeoutError(f"{taken:.0f} steps in the last of {seconds:.0f} s")
            task.result()
        finally:
            task.cancel()

    # -- what clients do -----------------------------------------------------------------------

    async def request(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        """A request with one right answer; a few read it slowly."""
        request = chooser.choice(pool)
        body = request.variant(chooser, server.drafters)
        pause = 0.05 if chooser.random() < 0.1 else 0.0
        half = chooser.random() < 0.1
        async with Connection(self.port) as connection:
            await connection.ask("POST", request.path, json.dumps(body).encode())
            status = await connection.status()
            if not self.judge.expect("compared requests", status, {200}, {request.path: body}):
                return
            if half and not body.get("stream"):
                connection.half_close()
            if body.get("stream"):
                answer = Answer.of([chunk async for chunk in connection.events(pause)])
            else:
                answer = Answer.of([json.loads(await connection.body())])
        self.judge.answered(request, answer, body)

    async def free(self, chooser: random.Random, pool: list[ClientRequest], server: Server) -> None:
        await self.sampled("unseeded", *free(chooser, server), {200})

    async def extreme(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        await self.sampled("extreme", *extreme(chooser, server), {200, 400, 408})

    async def sampled(self, kind: str, path: str, body: dict[str, Any], wanted: set[int]) -> None:
        async with Connection(self.port) as connection:
            await connection.ask("POST", path, json.dumps(body).encode())
            status = await connection.status()
            if not self.judge.expect(kind, status, wanted, {path: body}) or status != 200:
                return
            if body.get("stream"):
                answer = Answer.of([chunk async for chunk in connection.events()])
            else:
                answer = Answer.of([json.loads(await connection.body())])
        late = answer.error is not None and answer.error["code"] == "deadline_exceeded"
        if answer.error and not ("deadline" in body and late):
            self.judge.complain(f"{kind}: the stream ended with {answer.error}", {path: body})
        # What may end a text before its grammar, or stand before it.
        cut = body.keys() & {"stop", "stop_token_ids", "echo"}
        if answer.error is None and "response_format" in body and not cut:
            for choice in answer.choices.values():
                if choice.reason == "stop":
                    json.loads(choice.text)

    async def invalid(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        path, body, wanted = invalid(chooser, server)
        async with Connection(self.port) as connection:
            await connection.ask("POST", path, body)
            status = await connection.status()
            self.judge.expect("invalid", status, wanted, body.decode())
            answer = json.loads(await connection.body())
        if status >= 400 and not answer["error"]["message"]:
            self.judge.complain(f"invalid: status {status} without a message", body.decode())

    async def cancel(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        """Hangs up before the answer, or in the middle of it."""
        path, body = free(chooser, server)
        body |= {"max_tokens": 200, "ignore_eos": True}
        body.pop("response_format", None)
        self.judge.counts["cancelled"] += 1
        async with Connection(self.port) as connection:
            await connection.ask("POST", path, json.dumps(body).encode())
            if not body["stream"] or chooser.random() < 0.3:
                await asyncio.sleep(chooser.random() * 0.3)
                return
            status = await connection.status()
            if status not in (200, 429):
                self.judge.complain(f"cancelled: status {status}", {path: body})
            elif status == 200:
                left = chooser.choice((1, 3, 10))
                async for _ in connection.events():
                    left -= 1
                    if not left:
                        return

    async def deadline(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        path, body = free(chooser, server)
        body["deadline"] = chooser.choice((1e-9, 0.001, 0.05, 0.3))
        await self.sampled("deadline", path, body, {200, 408})

    async def hostile(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        act = chooser.choice(hostile.ACTS)
        try:
            status = await act(self.port, chooser, server.model)
        finally:
            self.judge.counts["hostile"] += 1
        if status >= 500 or status in (100, 101):
            self.judge.complain(f"hostile ({act.__name__}): status {status}")

    async def others(
        self, chooser: random.Random, pool: list[ClientRequest], server: Server
    ) -> None:
        """The other endpoints."""
        tokens = [chooser.choice(server.ids) for _ in range(20)]
        path, body = chooser.choice(
            (
                ("/v1/models", None),
                ("/version", None),
                ("/metrics", None),
                ("/openapi.json", None),
                ("/tokenize", {"prompt": "word " * chooser.choice((1, 1000, 100_000))}),
                ("/detokenize", {"tokens": tokens}),
            )
        )
        status, _ = await fetch(self.port, "GET" if body is None else "POST", path, body)
        self.judge.expect("other endpoints", status, {200}, path)

    # -- looking at the server -----------------------------------------------------------------

    async def watch(self, end: float) -> None:
        """A line every few seconds; ready throughout."""
        while time.monotonic() < end and self.process.process.poll() is None:
            await asyncio.sleep(min(5.0, max(0.1, end - time.monotonic())))
            await self.healthy("under load")
            counts = ", ".join(f"{n} {name}" for name, n in sorted(self.judge.counts.items()))
            self.say(f"{counts}; {held(self.process.process.pid)}")

    async def healthy(self, when: str) -> None:
        for path in ("/health", "/health/ready"):
            try:
                status, _ = await fetch(self.port, "GET", path)
            except (OSError, EOFError) as error:
                self.judge.complain(f"{path} {when}: {error!r}")
            else:
                if status != 200:
                    self.judge.complain(f"{path} {when}: status {status}")

    async def settle(self) -> bool:
        """Wait until nothing runs or waits; false if the server no longer says."""
        end = time.monotonic() + 60
        try:
            while await self.metric("requests_running") + await self.metric("requests_waiting"):
                if time.monotonic() > end:
                    self.judge.complain("requests are left though all clients have gone")
                    break
                await asyncio.sleep(0.2)
        except (OSError, EOFError, ValueError) as error:
            self.judge.complain(f"the server does not say what it does: {error!r}")
            return False
        await asyncio.sleep(0.5)  # connections are closed after the last byte
        return True

    async def metric(self, name: str) -> float:
        _, body = await fetch(self.port, "GET", "/metrics")
        found = re.search(rf"^paceline_{name} (\S+)$", body.decode(), re.MULTILINE)
        if found is None:
            raise ValueError(f"no metric {name}")
        return float(found[1])

    async def alone(self, pool: list[ClientRequest]) -> None:
        """Ask for everything that was answered once more: one at a time, without drafts."""
        for request in pool:
            if request.key not in self.judge.seen:
                continue
            with contextlib.suppress(*_HUNG_UP):
                status, body = await fetch(self.port, "POST", request.path, request.alone())
                if status == 200:
                    self.judge.compare(request, Answer.of([json.loads(body)]))
                else:
                    self.judge.complain(f"alone: status {status}", {request.path: request.alone()})
        self.judge.seen.clear()


@dataclass(frozen=True)
class Act:
    weight: float
    do: Callable[..., Any]


ACTS = {
    "request": Act(60, Storm.request),
    "free": Act(8, Storm.free),
    "extreme": Act(6, Storm.extreme),
    "invalid": Act(8, Storm.invalid),
    "cancel": Act(8, Storm.cancel),
    "deadline": Act(3, Storm.deadline),
    "hostile": Act(5, Storm.hostile),
    "others": Act(3, Storm.others),
}
