"""PACELINE_WHEEL=x86_64 (or aarch64): a wheel for Linux on it that has the kernels. Without it the
wheel is for every platform, and the kernels are built at the first run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("PACELINE_WHEEL")
        if not machine or version != "standard":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from paceline.kernels.compile import PREBUILT, build_for_wheel

        self.folder = tempfile.TemporaryDirectory()  # until the wheel is written
        file = build_for_wheel(machine, Path(self.folder.name))
        inside = PREBUILT.relative_to(PREBUILT.parents[2]) / file.parent.name / file.name
        build_data["force_include"][str(file)] = inside.as_posix()
        build_data["pure_python"] = False
        # auditwheel says which C library it needs, see `make dist`.
        build_data["tag"] = f"py3-none-manylinux_2_28_{machine}"
