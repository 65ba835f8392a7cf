"""Exported heads through vLLM's own classes, where its wheel lies.

``pip download --no-deps vllm`` and unpacked into DIR, then ``PACELINE_TEST_VLLM_WHEEL=DIR``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab.export import export

SCRIPT = Path(__file__).with_name("vllm_configs.py")
WHEEL = Path(os.environ.get("PACELINE_TEST_VLLM_WHEEL", "absent"))


@pytest.mark.skipif(
    not WHEEL.is_dir(), reason="vLLM's wheel is not here (PACELINE_TEST_VLLM_WHEEL)"
)
@pytest.mark.parametrize(
    ("kind", "architecture", "layers"),
    [
        ("eagle3", "Eagle3LlamaForCausalLM", [2, 6, 11]),
        ("dflash", "DFlashDraftModel", [2, 6, 10]),
        ("dspark", "Qwen3DSparkModel", [2, 6, 10]),
    ],
)
def test_it_takes_the_method_the_model_and_the_layers(
    kind: str, architecture: str, layers: list[int], tmp_path: Path
) -> None:
    draft = f"{kind}:paceline/tiny-{kind}"
    made = export("vllm", "paceline/tiny", draft, draft_length=4, out=tmp_path)
    command = [sys.executable, str(SCRIPT), str(WHEEL), str(tmp_path / "head")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    spec, model = json.loads(run.stdout)
    assert spec["method"] == made.config["method"] == kind
    assert made.config["num_speculative_tokens"] <= max(4, spec["num_speculative_tokens"])
    assert model["architectures"] == [architecture]
    assert model["eagle_aux_hidden_state_layer_ids"] == layers
    outputs = model.get("dflash_config", model).get("target_layer_ids")
    assert outputs == (None if kind == "eagle3" else [layer - 1 for layer in layers])
    registry = (WHEEL / "vllm/model_executor/models/registry.py").read_text()
    assert f'"{architecture}": (' in registry
    methods = (WHEEL / "vllm/config/speculative.py").read_text()
    assert f'"{kind}"' in methods
