"""The processes of the other tensor-parallel ranks, which rank 0 starts, watches and ends.

A rank ends when the pipe to its standard input closes, which happens however rank 0 ends. Rank 0
has a thread for each rank that waits for the end of its process.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.core import children
from paceline.errors import (
    ConfigError,
    EngineLostError,
    ModelLoadError,
    PacelineError,
    UnsupportedModelError,
)
from paceline.model.loading import load_module, plain_config
from paceline.model.target import CausalModel
from paceline.parallel.group import RankGroup, rank_environment

_HEADS = ("q_proj", "k_proj", "v_proj")  # split by columns, at the boundaries of heads
READY = "ready"
_START_SECONDS = 300.0  # to import torch; a busy machine with a cold disk needs a minute
_NOTICE_SECONDS = 3.0  # at most, from a failed collective to the end of the rank that caused it


class RankProcess:
    """The process of another rank. A thread calls ``ended`` with the way in which it ended."""

    def __init__(self, rank: int, job: dict[str, object], ended: Callable[[str], None]) -> None:
        self.ready = threading.Event()
        self._name, self._ended = f"rank {rank} of {job['size']}", ended
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        argument = json.dumps({**job, "rank": rank})
        self.popen = children.start("paceline.parallel.shared", argument, **pipes)
        threading.Thread(target=self._listen, name=f"paceline-rank-{rank}", daemon=True).start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        reason = ""
        for line in self.popen.stdout:
            if line.strip() == READY:
                self.ready.set()
            else:
                reason = line.strip()
        code = self.popen.wait()
        self.popen.stdout.close()
        self._ended(f"{self._name} {reason or children.exit_reason(code)}")
        self.ready.set()

    def end(self) -> None:
        """Close the pipe, which ends the process, and wait for that."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        children.wait_or_kill(self.popen)


class RankProcesses:
    """All ranks, on ``device``: a CPU or the first of ``size`` GPUs. ``lost``: why they failed;
    None while they work. There is no way back from a failure."""

    def __init__(self, size: int, device: torch.device, job: dict[str, object]) -> None:
        """Start the other ranks and wait for all. Raises ConfigError, PacelineError."""
        check_devices(size, device)
        self.size = size
        self._lost = Future[str]()  # the reason
        self._cuda = device.type == "cuda"
        self._group: RankGroup | None = None
        self._closed = False
        self._threads = torch.get_num_threads()
        share = max(1, self._threads // size)
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ranks-")
        store = str(Path(self._folder.name) / "store")
        job = job | {"size": size, "store": store, "device": device.type, "threads": share}
        self.processes: list[RankProcess] = []
        for rank in range(1, size):
            self.processes.append(RankProcess(rank, job, self.lose))
        if device.type == "cpu":
            torch.set_num_threads(share)
        try:
            for process in self.processes:
                process.ready.wait(_START_SECONDS)
            with self.loading():
                self._group = RankGroup(0, size, store, device)
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> RankGroup:
        assert self._group is not None
        return self._group

    @property
    def lost(self) -> str | None:
        return self._lost.result() if self._lost.done() else None

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self._lost.add_done_callback(lambda lost: callback(lost.result()))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A step before the first forward. Raises ModelLoadError if another rank is lost."""
        try:
            if self.lost is not None:
                raise EngineLostError(self.lost)
            with rank_environment(0):
                yield
        except Exception as error:
            wait([self._lost], _NOTICE_SECONDS)
            everywhere = isinstance(error, PacelineError) and str(error) in (self.lost or "")
            if self.lost is None or (everywhere and not isinstance(error, EngineLostError)):
                raise
            raise ModelLoadError(f"while {self.size} ranks were loading, {self.lost}") from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose a collective operation of all ranks. If it fails here, the ranks are out of step
        and lost; so they are if it takes too long (group.py). Raises EngineLostError."""
        if self.lost is not None:
            raise EngineLostError(self.lost)
        try:
            yield
        except BaseException as error:
            wait([self._lost], _NOTICE_SECONDS)
            words = " ".join(str(error).split())[:300]
            self.lose(f"rank 0 of {self.size} failed: {type(error).__name__}: {words}")
            if isinstance(error, Exception):
                raise EngineLostError(self.lost or "") from error
            raise

    def lose(self, reason: str) -> None:
        """Mark the ranks as lost for this reason, unless they are already, and kill the others."""
        if self._closed or self._lost.done():
            return
        with suppress(InvalidStateError):  # another thread was faster
            self._lost.set_result(reason)
        for process in self.processes:
            process.popen.kill()
        if self._cuda:  # a GPU that waits for another one does not notice a closed connection
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.lost is None and self._group is not None:
            with suppress(Exception):
                self._group.broadcast("stop")
        for process in self.processes:
            process.end()
        if self._group is not None:
            with suppress(Exception):
                self._group.leave()
        torch.set_num_threads(self._threads)
        self._folder.cleanup()


def check_devices(size: int, device: torch.device) -> None:
    """Raise ConfigError if ``size`` ranks cannot run on this machine."""
    asked = f"tensor_parallel={size}"
    if dist.is_initialized():
        raise ConfigError(
            f"{asked}: this process is in a torch.distributed group already, perhaps of another "
            "LLM with tensor_parallel; close that first"
        )
    seen = torch.cuda.device_count()
    if device.type == "cuda" and device.index not in (None, 0):
        raise ConfigError(f"{asked} takes cuda:0 and those after it; say device cuda")
    if device.type == "cuda" and seen < size:
        raise ConfigError(f"{asked} needs {size} CUDA devices, but PyTorch sees {seen}")
    if device.type != "cuda" and seen:
        raise ConfigError(
            f"{asked} on a processor: transformers takes the GPUs where there are some; hide them "
            "with CUDA_VISIBLE_DEVICES= (empty), or use device cuda"
        )


# -- which models ranks can share ----------------------------------------------------------------
# transformers shards a model by its tensor-parallel plan. Each rank reads only its slices of the
# checkpoint.


def load_part(name: str, dtype: str, device: torch.device, size: int) -> CausalModel:
    """Load this rank's part of a model. All ranks must call this: they probe it together."""
    from transformers.distributed import DistributedConfig

    module = load_module(name, dtype, device, distributed_config=DistributedConfig(tp_size=size))
    del module.config.distributed_config  # it is not a property of the model
    return CausalModel(module, name)


def check_shareable(name: str, size: int) -> None:
    """Raise ConfigError, UnsupportedModelError or ModelLoadError if ranks cannot share a model."""
    config = plain_config(name, f"tensor_parallel={size}")
    text = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(
            f"{config.model_type} has no tensor-parallel plan in transformers, so ranks cannot "
            f"share it; run {name} on one device"
        )
    cut = {key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"}
    if not cut.intersection(_HEADS):
        return  # all ranks have all heads
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or shared % size:
        raise ConfigError(
            f"{name} has {heads} attention heads over {shared} KV heads, which {size} ranks "
            "cannot share evenly; use a number that divides both"
        )
