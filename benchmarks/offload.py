"""A target whose layers stay on disk: tokens per second with drafts and without.

The model is copied in float32 into a folder that no other process has open. Before every forward of
the target the copy is dropped from the page cache (posix_fadvise DONTNEED), so that each forward
reads its layers from the disk. The bytes that came from the disk are counted by the kernel
(read_bytes of /proc/self/io, Linux). All engines decode the same chats greedily, one at a time,
with the same weights. Drafts must give the tokens of plain decoding.

The draft length is fixed, because the costs that "auto" measures at start-up would be those of
files in the page cache.

    python benchmarks/offload.py
    python benchmarks/offload.py --draft none,ngram --max-tokens 96 --memory 128M

The last line of the output is one JSON object."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

from measuring import finish
from native import wide
from paceline.core.batch import Batch, ModelOutput
from paceline.core.memory import parse_bytes
from paceline.core.params import SamplingParams
from paceline.lab.bench.result import machine_of
from paceline.lab.report.document import Column, table_of
from paceline.lab.report.render import print_table
from paceline.llm import LLM
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.names import weight_files

CHATS = (
    "Repeat this list and add two more: apples, pears, plums, apples, pears, plums.",
    "Write a short story about a girl who finds a map.",
    "Correct the spelling: Teh quick brown fox jumsp over teh lazy dog.",
)
DRAFTS = "none,ngram,hybrid:suffix+ngram+eagle3:paceline/smollm2-eagle3"


class ColdTarget:
    """A target whose files are dropped from the page cache before each of its forwards."""

    def __init__(self, target: Any, files: Sequence[Path]) -> None:
        self._target = target
        self._files = [os.open(file, os.O_RDONLY) for file in files]
        self.forwards, self.read, self.seconds = 0, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, batch: Batch, *rest: Any) -> ModelOutput:
        for file in self._files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        before, start = bytes_from_disk(), time.perf_counter()
        out: ModelOutput = self._target(batch, *rest)
        self.forwards += 1
        self.seconds += time.perf_counter() - start
        self.read += bytes_from_disk() - before
        return out


def bytes_from_disk() -> int:
    """Bytes that the kernel fetched from storage for this process, by reads and page faults."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


def write_model(model: str, folder: Path, layers: int | None) -> Path:
    """Write the model in float32, in which drafts give the tokens of plain decoding; or ``layers``
    layers of random bf16 weights in the shape of Llama 3.1 8B, to measure bytes and seconds per
    step, with the model's tokenizer."""
    if layers:
        wide(layers, folder, 128256)
    else:
        load_module(model, torch.float32, "cpu", "sdpa").save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    os.sync()  # pages that are not on the disk yet cannot be dropped
    return folder


def decode(
    plain: LLM, draft: str, files: Sequence[Path], tokens: int, length: int, chats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures and texts of chats, one after another, prefill included."""
    llm = plain.with_draft(
        None if draft == "none" else draft, draft_length=length, max_batch_size=1
    )
    cold = ColdTarget(llm.engine.target, files)
    llm.engine.target = cold  # type: ignore[assignment]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    done = [llm.chat([{"role": "user", "content": chat}], params)[0] for chat in CHATS[:chats]]
    seconds = time.perf_counter() - start
    texts = [completion.token_ids for completion in done]
    written = sum(map(len, texts))
    figures = {
        "draft": draft,
        "tokens_per_second": round(written / seconds, 2),
        "tokens_per_forward": round(written / cold.forwards, 2),
        "seconds_per_forward": round(cold.seconds / cold.forwards, 3),
        "disk_mb_per_forward": round(cold.read / cold.forwards / 1e6),
    }
    return figures, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="paceline/smollm2")
    parser.add_argument(
        "--draft", "--drafts", default=DRAFTS, help="Draft specs, separated by commas."
    )
    parser.add_argument(
        "--draft-length", "--length", type=int, default=6, help="Tokens drafted per step."
    )
    parser.add_argument(
        "--max-tokens", "--tokens", type=int, default=48, help="New tokens per answer."
    )
    parser.add_argument("--chats", type=int, default=len(CHATS), help="Number of chats.")
    parser.add_argument(
        "--layers", type=int, help="Use this many layers of an 8B model, with random weights."
    )
    parser.add_argument("--memory", default="1M", help="Memory for layers that stay in it.")
    parser.add_argument("--folder", help="Folder for the copy; default: that of temporary files.")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kept = parse_bytes(options.memory)
        model = write_model(options.model, Path(folder) / "model", options.layers)
        dtype = "bfloat16" if options.layers else "float32"
        plain = LLM(str(model), draft="none", dtype=dtype, offload="disk", weights_memory=kept)
        files = weight_files(model)
        drafts = ["none", *(draft for draft in options.draft.split(",") if draft != "none")]
        how = options.max_tokens, options.draft_length, options.chats
        rows, texts = zip(*(decode(plain, draft, files, *how) for draft in drafts), strict=True)
    for row, text in zip(rows, texts, strict=True):
        row["by_plain"] = round(row["tokens_per_second"] / rows[0]["tokens_per_second"], 2)
        # Not meaningful for random weights in bf16, with which near ties are common.
        row["same_text"] = text == texts[0]
    print(*plain.setup_notes, sep="\n")
    columns = [Column(key, key.replace("_", " "), shown=str) for key in rows[0]]
    print_table(table_of(rows, columns), Console())
    finish(
        {"machine": machine_of(plain), "length": options.draft_length, "rows": rows}, options.json
    )


if __name__ == "__main__":
    main()
