#!/usr/bin/env bash
# Trains the embedded pair, paceline/tiny and paceline/tiny-draft, from a folder of corpus files.
#
#   recipes/embedded.sh DATA_FOLDER OUT_FOLDER [extra options of `paceline train lm`]
#
# Every stage resumes where it was cut off when the same command is run again. On two CPU cores
# it takes about two hours, on a GPU minutes. STEPS, DRAFT_STEPS and RECORDS set the length.
set -euo pipefail
data=${1:?folder with stories.train.jsonl.gz and the others}
out=${2:?folder for the runs}
shift 2

# Waiting threads that sleep instead of spinning, and no page faults for every large buffer.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-8589934592}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}

corpus=()
valid=()
for item in stories=30 math_synthetic=20 math=5 code=22 chat=23; do
  corpus+=(--data "$data/${item%=*}.train.jsonl.gz=${item#*=}")
  valid+=(--valid "$data/${item%=*}.valid.jsonl.gz")
done

# 1. The target: deep and narrow.
paceline train lm "${corpus[@]}" "${valid[@]}" --out "$out/target" --compile \
  --steps "${STEPS:-1150}" "$@"

# 2. Text that the target writes itself: greedy (also past the ends of texts) and sampled.
write() { # name, then options of `paceline train sample`
  local file="$out/written-$1.jsonl"
  shift
  [ -s "$file" ] || {
    paceline train sample --model "$out/target/model" "${corpus[@]}" --out "$file.part" \
      --count "${RECORDS:-4000}" --batch 64 "$@"
    mv "$file.part" "$file"
  }
}
write greedy --temperature 0
write greedy-on --temperature 0 --ignore-eos --max-tokens 128 --seed 1
write sampled --temperature 0.8 --seed 2

# 3. The draft: two layers, first taught by the text, then distilled from the target.
draft=(--hidden-size 192 --layers 2 --heads 3 --kv-heads 3 --ffn-size 512)
paceline train lm "${corpus[@]}" "${valid[@]}" --tokenizer "$out/target/model" "${draft[@]}" \
  --out "$out/draft-text" --compile --steps "${TEXT_STEPS:-500}" "$@"
paceline train lm "${corpus[@]}" "${valid[@]}" --teacher "$out/target/model" \
  --init "$out/draft-text/model" --argmax-weight 0.3 --text-weight 0 "${draft[@]}" \
  --data "$out/written-greedy.jsonl=60" --data "$out/written-greedy-on.jsonl=60" \
  --data "$out/written-sampled.jsonl=40" \
  --out "$out/draft" --compile --steps "${DRAFT_STEPS:-900}" "$@"

echo "copy $out/target/model to src/paceline/assets/tiny and $out/draft/model to .../tiny-draft"
