"""What vLLM's own classes make of an exported head: ``vllm_configs.py FOLDER HEAD``.

FOLDER is where its wheel was put without what it depends on. So the package's own ``__init__`` is
passed by, and so is the module of helpers that wants all of it; the classes are its own. Prints the
speculative config and the model's config as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    folder, head = sys.argv[1:]
    for name in ("vllm", "vllm.transformers_utils", "vllm.transformers_utils.configs"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [f"{folder}/{name.replace('.', '/')}"]
    helpers = sys.modules["vllm.transformers_utils.utils"] = ModuleType("utils")
    helpers.without_trust_remote_code = dict  # type: ignore[attr-defined]
    configs = importlib.import_module("vllm.transformers_utils.configs.speculators.base")
    reader = configs.SpeculatorsConfig
    stated = json.loads(Path(head, "config.json").read_text())
    spec = reader.extract_vllm_speculative_config(stated)
    print(json.dumps([spec, reader.from_pretrained(head).to_dict()], default=str))


if __name__ == "__main__":
    main()
