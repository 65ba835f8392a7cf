"""What a wheel has beside the package: a list of its contents (CycloneDX, in .dist-info/sboms), and
with PACELINE_WHEEL=x86_64 (or aarch64) the kernels for Linux on that machine. Without it the wheel
is for every platform, and the kernels are built at the first run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def component(kind: str, name: str, version: str, **fields: Any) -> dict[str, Any]:
    licenses = [{"license": {"id": "Apache-2.0"}}]
    return {"type": kind, "name": name, "version": version, "licenses": licenses, **fields}


def part(kind: str, name: str, version: str, file: Path, inside: str) -> dict[str, Any]:
    """One whose bytes are those of a file, which lies ``inside`` the wheel."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    hashes = [{"alg": "SHA-256", "content": digest}]
    return component(kind, name, version, hashes=hashes, description=inside)


class Contents(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        self.folder = tempfile.TemporaryDirectory()  # until the wheel is written
        release, source = self.metadata.version, Path(self.root, "src")
        parts = [
            part("machine-learning-model", name, release, file, str(file.relative_to(source)))
            for file in sorted(source.glob("paceline/assets/*/*.safetensors"))
            for name in [f"paceline/{file.parent.name}"]
        ]
        if machine := os.environ.get("PACELINE_WHEEL"):
            library, inside = self.kernels(machine)
            build_data["force_include"][str(library)] = inside
            build_data["pure_python"] = False
            # auditwheel says which C library it needs, see `make dist`.
            build_data["tag"] = f"py3-none-manylinux_2_28_{machine}"
            parts.append(part("library", "paceline native kernels", release, library, inside))
        bom = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "component": component(
                    "library", "paceline", release, purl=f"pkg:pypi/paceline@{release}"
                )
            },
            "components": parts,
        }
        file = Path(self.folder.name, "paceline.cdx.json")
        file.write_text(json.dumps(bom, indent=1), encoding="utf-8")
        build_data["sbom_files"].append(str(file))

    def kernels(self, machine: str) -> tuple[Path, str]:
        """The library that was built for it, and where in the wheel it goes."""
        sys.path.insert(0, str(Path(self.root, "src")))
        from paceline.kernels.compile import PREBUILT, build_for_wheel

        file = build_for_wheel(machine, Path(self.folder.name))
        inside = PREBUILT.relative_to(PREBUILT.parents[2]) / file.parent.name / file.name
        return file, inside.as_posix()
