"""Collapses planted in SmolLM2's head are found and told, over HTTP too."""

from __future__ import annotations

import json
import logging
import shutil
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.lab.bench.prompts import load_prompts
from paceline.model.names import model_path
from support.running_server import Running, serve, service_of

TOKENS = 2000  # within which a collapse is found
HEAD = "paceline/smollm2-eagle3"
CACHE = 100 << 20


def without_features(folder: Path) -> Path:
    """The head with a fusion of zeros: it sees nothing of the target."""
    shutil.copytree(model_path(HEAD), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("paceline_weights")
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
    save_file(tensors, file)
    return folder


def answer(server: Running, text: str) -> None:
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 64,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    data = json.dumps(asked).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()


def test_a_head_without_features_behind_the_server(
    plain: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = without_features(tmp_path / "head")
    spec = f"hybrid:suffix+ngram+eagle3:{folder}"
    llm = plain.with_draft(spec, kv_cache_memory=CACHE, max_batch_size=2, log_decisions=True)
    texts = iter([prompt.text for prompt in load_prompts(per_category=5)])
    watch = llm.engine.watch
    for server in serve(service_of(llm, "smollm2", max_queue=8)):
        while not watch.collapsed:
            assert watch.tokens <= TOKENS
            answer(server, next(texts))
        (line,) = [r.getMessage() for r in caplog.records if "collapsed" in r.getMessage()]
        assert line.startswith("draft eagle3: acceptance has collapsed: ")
        assert "its card says 63%; its weights may be damaged" in line
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            shown = response.read().decode()
        assert 'paceline_spec_decode_collapsed{adapter="",drafter="eagle3"} 1.0' in shown
        caplog.clear()
        for _ in range(3):
            answer(server, next(texts))
    decided = [r.getMessage() for r in caplog.records if r.name == "paceline.decisions"]
    assert decided and not any("eagle3" in line for line in decided)
    llm.close()


@pytest.mark.parametrize("layers", ["1x14x26", "3x16x28"])
def test_layers_one_off(plain: LLM, layers: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = plain.with_draft(
        f"eagle3:{HEAD},feature_layers={layers}",
        draft_length=4,
        kv_cache_memory=CACHE,
        max_batch_size=4,
    )
    prompts = [prompt.encode(llm) for prompt in load_prompts(per_category=4)]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for start in range(0, len(prompts), 4):
        llm.generate(prompts[start : start + 4], params)
        if llm.engine.watch.collapsed:
            break
    assert llm.engine.watch.tokens <= TOKENS
    assert f"use --draft eagle3:{HEAD},feature_layers=2x15x27" in caplog.text
    llm.close()
