"""What is to be said about a model in a GGUF file."""

from __future__ import annotations

from paceline.model.gguf import GgufFile
from paceline.tools.doctor.findings import Finding, finding
from paceline.tools.doctor.machine import size

_BF16, _F32 = 2, 4  # bytes of a number


def check_gguf(file: GgufFile, about: str) -> list[Finding]:
    """That it is dequantised and what that takes, and what transformers does not take from it."""
    kinds = ", ".join(f"{number} tensors in {name}" for name, number in file.types.items())
    text = (
        f"{file.path.name} ({kinds}) takes {size(file.stored_bytes)} on the disk and, dequantised, "
        f"{size(file.parameters * _BF16)} of memory in bfloat16 or "
        f"{size(file.parameters * _F32)} in float32"
    )
    findings = [finding("gguf-dequantised", about, text)]
    if file.splits_otherwise:
        text = f"the file splits text as {file.pre_tokenizer!r} does, which is not known here"
        findings.append(finding("gguf-tokenizer-unsure", about, text))
    if file.rope_factors:
        text = "rope_freqs.weight is among the tensors"
        findings.append(finding("gguf-rope-factors", about, text))
    return findings
