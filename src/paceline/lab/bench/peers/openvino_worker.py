"""Runs OpenVINO GenAI for ``openvino.py``, in a Python that need not have paceline: a program.

    openvino_worker.py FOLDER THREADS CLIENTS

Every line of stdin is a list of requests, every line of stdout an answer, both JSON; the first line
says that it is ready. ``{"error": TEXT}`` ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import deque
from typing import Any, TextIO


class Pipeline:
    """Continuous batching on the processor, every request a number of steps."""

    def __init__(self, folder: str, threads: int, clients: int) -> None:
        self.numpy = importlib.import_module("numpy")
        self.openvino = importlib.import_module("openvino")
        self.genai = importlib.import_module("openvino_genai")
        self.clients, self.number = clients, 0
        scheduler = self.genai.SchedulerConfig()
        scheduler.max_num_seqs = clients
        scheduler.cache_size = 1 + clients // 8  # gigabytes
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.pipe = self.genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def about(self) -> dict[str, str]:
        core = self.openvino.Core()
        names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        found = {name: named(core.get_property("CPU", name)) for name in names}
        return {"version": str(self.genai.__version__), **found}

    def begin(self, ask: dict[str, Any]) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = ask["max_tokens"]
        config.ignore_eos = ask["ignore_eos"]
        config.apply_chat_template = False
        config.do_sample = ask["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = ask["temperature"], 1.0
        if ask["seed"] is not None:
            config.rng_seed = ask["seed"]
        ids = self.openvino.Tensor(self.numpy.array([ask["ids"]], dtype=self.numpy.int64))
        self.number += 1
        return self.pipe.add_request(self.number, ids, config)

    def run(self, asks: list[dict[str, Any]]) -> dict[str, Any]:
        """Clients that each send their next request when one is answered."""
        answers: list[dict[str, Any]] = [{"ids": [], "arrivals": []} for _ in asks]
        waiting, going = deque(range(len(asks))), dict[int, tuple[Any, float]]()
        start = time.perf_counter()
        while waiting or going:
            while waiting and len(going) < self.clients:
                place = waiting.popleft()
                going[place] = self.begin(asks[place]), time.perf_counter()
            self.pipe.step()
            now = time.perf_counter()
            for place, (handle, sent) in list(going.items()):
                fresh: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        fresh += map(int, output.generated_ids)
                if fresh:
                    answers[place]["ids"] += fresh
                    answers[place]["arrivals"].append([now - sent, len(fresh)])
                if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                    del going[place]
        return {"seconds": time.perf_counter() - start, "answers": answers}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.path.pop(0)  # this folder, whose openvino.py is not the library
    os.dup2(2, 1)  # whatever the library prints is no answer
    try:
        pipeline = Pipeline(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        say(out, {"ready": pipeline.about()})
        for line in sys.stdin:
            say(out, pipeline.run(json.loads(line)))
    except ImportError as error:
        say(out, {"missing": str(error.name or error)})
    except Exception as error:  # whatever a library raises: its first line is what is told
        lines = str(error).strip().splitlines() or [type(error).__name__]
        say(out, {"error": lines[-1].strip()})


def named(kind: Any) -> str:
    """``bfloat16`` of ``<Type: 'bfloat16'>``, as the library writes it."""
    return str(kind).removeprefix("<Type: '").removesuffix("'>")


def say(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
