"""What SGLang's own arguments make of a command line: ``sglang_parser.py FOLDER ARGUMENT...``.

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
from types import ModuleType
from typing import Any


class Helpers(ModuleType):
    """In the place of ``sglang.srt.utils``: functions that read values we do not write."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return str


def parser_of(folder: str) -> argparse.ArgumentParser:
    package = ModuleType("sglang")
    package.__path__ = [f"{folder}/sglang"]
    sys.modules["sglang"] = package
    for name in ("sglang.srt.utils", "sglang.srt.utils.common"):
        sys.modules[name] = Helpers(name)
    groups = importlib.import_module("sglang.srt.arg_groups.arg_utils")
    parser = argparse.ArgumentParser("sglang", allow_abbrev=False)
    for name, owner in (("model", "Model"), ("schedule", "Schedule"), ("spec", "Spec")):
        fields = importlib.import_module(f"sglang.srt.arg_groups.fields.{name}")
        groups.add_cli_args_from_dataclass(parser, getattr(fields, owner))
    return parser


def main() -> None:
    parser = parser_of(sys.argv[1])
    values = vars(parser.parse_args(sys.argv[2:]))
    (algorithm,) = (a for a in parser._actions if a.dest == "speculative_algorithm")
    print(json.dumps({"values": values, "algorithms": algorithm.help}, default=str))


if __name__ == "__main__":
    main()
