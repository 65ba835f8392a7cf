#!/usr/bin/env bash
# Trains the embedded models: the target paceline/tiny, its draft model paceline/tiny-draft, and its
# heads paceline/tiny-eagle3, tiny-eagle and tiny-medusa, from a folder of corpus files.
#
#   recipes/embedded.sh DATA_FOLDER OUT_FOLDER [options of all `paceline train` commands]
#
# Every stage resumes after an interruption when the same command is run again. It takes about four
# hours on two CPU cores, and minutes on a GPU. STEPS, DRAFT_STEPS, EAGLE_STEPS, MEDUSA_STEPS and
# RECORDS set the length.
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
here=$(dirname "$0")
python "$here/embedded_target.py" "${corpus[@]}" --out "$out/target" --compile --loss-on all \
  --steps "${STEPS:-1150}" "$@"

# 2. Text that the target generates: greedy (also past end tokens) and sampled.
write() { # name, then options of `paceline train sample`
  local file="$out/written-$1.jsonl"
  shift
  [ -s "$file" ] || paceline train sample --model "$out/target/model" "${corpus[@]}" --out "$file" \
    --num-prompts "${RECORDS:-4000}" --max-tokens 160 --max-batch-size 64 "$@"
}
write greedy --temperature 0
write greedy-on --temperature 0 --ignore-eos --max-tokens 128 --seed 1
write sampled --temperature 0.8 --seed 2

# 3. The draft model: two layers, first trained on the text, then distilled from the target.
draft=(--hidden-size 192 --layers 2 --heads 3 --kv-heads 3 --ffn-size 512)
python "$here/embedded_target.py" "${corpus[@]}" --tokenizer "$out/target/model" "${draft[@]}" \
  --out "$out/draft-text" --compile --loss-on all --steps "${TEXT_STEPS:-500}" "$@"
paceline train draft "${corpus[@]}" "${valid[@]}" --model "$out/target/model" \
  --init "$out/draft-text/model" --argmax-weight 0.3 \
  --data "$out/written-greedy.jsonl=60" --data "$out/written-greedy-on.jsonl=60" \
  --data "$out/written-sampled.jsonl=40" \
  --out "$out/draft" --compile --steps "${DRAFT_STEPS:-900}" "$@"

# 4. Heads, on text that the target generated and a tenth of the corpus.
long=()
for item in summ=60 docs=20 chat=20; do
  long+=(--data "$data/${item%=*}.train.jsonl.gz=${item#*=}")
done
[ -s "$out/written-long.jsonl" ] || paceline train sample --model "$out/target/model" "${long[@]}" \
  --max-text-len 420 --seed 3 --out "$out/written-long.jsonl" --num-prompts "${RECORDS:-4000}" \
  --max-tokens 128 --max-batch-size 64
data_options=(--model "$out/target/model" --valid "$data/summ.valid.jsonl.gz" "${valid[@]}")
for item in greedy=38 greedy-on=22 sampled=5 long=20; do
  data_options+=(--data "$out/written-${item%=*}.jsonl=${item#*=}")
done
for item in stories=3 math_synthetic=2 math=1 code=3 chat=3 summ=2; do
  data_options+=(--data "$data/${item%=*}.train.jsonl.gz=${item#*=}")
done
paceline train eagle3 "${data_options[@]}" --feature-layers 2,6,11 --draft-vocab-size 3072 \
  --ttt-steps 6 --step-decay 0.9 --out "$out/eagle3" --compile --steps "${EAGLE_STEPS:-2250}" "$@"
paceline train eagle "${data_options[@]}" --ttt-steps 3 --token-weight 1 --long-every 0 \
  --out "$out/eagle" --compile --steps "${EAGLE1_STEPS:-420}" "$@"
paceline train medusa "${data_options[@]}" --medusa-heads 4 --medusa-layers 2 --shared-head --held-out 40 \
  --long-every 0 --lr 0.012 --adam-lr 0.006 --warmup 25 \
  --out "$out/medusa" --compile --steps "${MEDUSA_STEPS:-780}" "$@"

echo "copy $out/target/model to src/paceline/assets/tiny, $out/draft/model to .../tiny-draft,"
echo "and the folders head of eagle3, eagle and medusa to .../tiny-eagle3, tiny-eagle, tiny-medusa"
