"""What ends with an AsyncLLM's context, and with the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from paceline import AsyncLLM, PacelineError, PromptError, SamplingParams
from support.served_process import START_SECONDS

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


def test_a_context_of_its_own() -> None:
    async def main() -> None:
        async with AsyncLLM(
            "paceline/tiny", draft="none", dtype="float32", max_batch_size=2
        ) as own:
            (one,) = await own.chat(
                [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4)
            )
            assert one.token_ids
            with pytest.raises(PromptError, match="empty"):
                await own.generate("")
            stream = own.stream("")
            with pytest.raises(PromptError, match="empty"):
                await anext(stream)
            waiting = asyncio.create_task(own.generate("Once upon a time", LONG))
            await asyncio.sleep(0.05)
        with pytest.raises(PacelineError, match="has been closed"):
            await waiting
        with pytest.raises(PacelineError, match="has been closed"):
            await own.generate("x")

    asyncio.run(main())


ENDS = """
import atexit, threading, asyncio
# Called last of all, so after whatever the package does at the end.
atexit.register(lambda: print("unfinished:", any(r.completion is None for r in waiting.values())))
from paceline import LLM, AsyncLLM, SamplingParams
llm = LLM("paceline/tiny", draft="none", dtype="float32")
long = SamplingParams(max_tokens=1500, ignore_eos=True)
threads = [threading.Thread(target=llm.generate, args=("x", long), daemon=True) for _ in range(3)]
[thread.start() for thread in threads]
stream = llm.stream("y", long)
next(stream)
waiting = llm.owner.requests
async def main():
    task = asyncio.create_task(AsyncLLM.from_llm(llm).generate("z", long))
    await asyncio.sleep(0.05)
asyncio.run(main())
print("over", flush=True)
"""


@pytest.mark.slow  # a process more
def test_a_process_ends_whoever_still_waits() -> None:
    """However long a busy machine takes to load torch: texts would go on, and a hang has no end."""
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "over\nunfinished: True\n"
