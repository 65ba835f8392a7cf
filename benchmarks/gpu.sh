#!/usr/bin/env bash
# `make gpu-check` and benchmarks on a CUDA machine: every drafter's texts compared with those on the
# CPU, the cost of steps and a captured step (gpu_check.py); then the embedded pair, the pair inflated
# to 8B and 0.6B, and every drafter on both.
# Run from the root of the repository, in an environment where Paceline and a CUDA build of torch
# are installed. Needs about 20 GB of disk for the inflated pair and 75 GB of GPU memory.
# Options are passed to paceline bench.
#
#   benchmarks/gpu.sh [OUTPUT_FOLDER] [OPTIONS OF paceline bench ...]
set -euo pipefail
cd "$(dirname "$0")/.."

out=runs/gpu
if [[ $# -gt 0 && $1 != --* ]]; then
    out=$1
    shift
fi
mkdir -p "$out"
python=${PYTHON:-python}
[[ -x .venv/bin/python && -z ${PYTHON:-} ]] && python=.venv/bin/python

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: torch sees no CUDA device")'
"$python" benchmarks/gpu_check.py --json "$out/check.json"
target=$("$python" benchmarks/inflate.py paceline/tiny --preset 8b)
draft=$("$python" benchmarks/inflate.py paceline/tiny-draft --preset 0.6b)
"$python" -m paceline bench --device cuda --model "$target" --draft "$draft" \
    -m draft@4 -m draft --per-category 2 \
    --json "$@" > "$out/bench.json"
for pair in tiny inflated; do
    "$python" benchmarks/drafters.py --device cuda --pair "$pair" --presets 8b,0.6b \
        --json "$out/drafters.jsonl" --report "$out/drafters.md"
done
