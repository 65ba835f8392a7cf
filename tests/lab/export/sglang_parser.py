"""What SGLang's own arguments make of a command line: ``sglang_parser.py FOLDER ARGUMENT...``; and
what its own reader makes of a block drafter's config: ``sglang_parser.py FOLDER head HEAD``.

FOLDER is where its wheel was put without what it depends on. So the package's own ``__init__``,
which loads all of it, is passed by, and so is the module of a hundred helpers that wants a GPU's
libraries; the declarations of the arguments and the function that makes a parser of them are its
own. Prints the values as JSON, and the algorithms that its help names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Helpers(ModuleType):
    """In the place of ``sglang.srt.utils``: functions that read values we do not write."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return str


# What block drafters' configs are read beside: kernels, layers and the running server.
SERVER = (
    *("srt.arg_groups.overrides", "srt.runtime_context", "kernels.ops.sampling.renorm"),
    *("kernels.ops.speculative.verify_sampling", "srt.layers.quantization.unquant"),
    *("srt.layers.sampler", "srt.managers.schedule_batch", "srt.speculative.spec_utils"),
    "srt.model_executor.runner_utils.pool",
)


def load(folder: str, *helpers: str) -> None:
    package = ModuleType("sglang")
    package.__path__ = [f"{folder}/sglang"]
    sys.modules["sglang"] = package
    for name in ("srt.utils", "srt.utils.common", *helpers):
        sys.modules[f"sglang.{name}"] = Helpers(f"sglang.{name}")


def head_of(folder: str, head: str) -> dict[str, Any]:
    load(folder, *SERVER)
    reader = importlib.import_module("sglang.srt.speculative.dspark_components.dspark_config")
    config = json.loads(Path(head, "config.json").read_text())
    read = reader.parse_dspark_draft_config(draft_hf_config=config)
    return {name: getattr(read, name) for name in read.__struct_fields__}


def parser_of(folder: str) -> argparse.ArgumentParser:
    load(folder)
    groups = importlib.import_module("sglang.srt.arg_groups.arg_utils")
    parser = argparse.ArgumentParser("sglang", allow_abbrev=False)
    for name, owner in (("model", "Model"), ("schedule", "Schedule"), ("spec", "Spec")):
        fields = importlib.import_module(f"sglang.srt.arg_groups.fields.{name}")
        groups.add_cli_args_from_dataclass(parser, getattr(fields, owner))
    return parser


def main() -> None:
    if sys.argv[2] == "head":
        print(json.dumps(head_of(sys.argv[1], sys.argv[3])))
        return
    parser = parser_of(sys.argv[1])
    values = vars(parser.parse_args(sys.argv[2:]))
    (algorithm,) = (a for a in parser._actions if a.dest == "speculative_algorithm")
    print(json.dumps({"values": values, "algorithms": algorithm.help}, default=str))


if __name__ == "__main__":
    main()
