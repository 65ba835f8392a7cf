#!/usr/bin/env bash
# Trains the drafters of SmolLM2-135M-Instruct: an EAGLE-3 head, Medusa heads and a small draft
# model. The data are public instruction texts in the target's chat template, and answers that the
# target generates to prompts from a folder of corpus files. 8,043 such answers are stored in
# recipes/data, so that PROMPTS=0 generates none.
#
#   recipes/smollm2.sh DATA_FOLDER OUT_FOLDER [options of all `paceline train` commands]
#
# Every stage resumes after an interruption when the same command is run again. MODEL: the target;
# PROMPTS: number of prompts that it answers; TOKENS: maximum length of an answer; SHARDS: number of
# processes that generate answers (one per core; 1 on a GPU); EAGLE_STEPS, MEDUSA_STEPS and
# DRAFT_STEPS: training steps. VALID: a folder of held-out prompts (mt_bench.jsonl and others).
#
# To continue from the published head without generating answers (with another seed, because the
# same seed would begin with the same texts):
#
#   PROMPTS=0 EAGLE_INIT=paceline/smollm2-eagle3 recipes/smollm2.sh DATA OUT --seed 1 --lr 0.001 --adam-lr 0.0003
set -euo pipefail
data=${1:?folder with chat.train.jsonl.gz and the others}
out=${2:?folder for the runs}
shift 2
model=${MODEL:-paceline/smollm2}
shards=${SHARDS:-2}
here=$(cd "$(dirname "$0")" && pwd)

# Waiting threads that sleep instead of spinning, and no page faults for every large buffer.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-8589934592}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
mkdir -p "$out"

# Every command runs in a process group of its own, which is interrupted when this script ends in any
# way, so that nothing continues to write. Commands save their state when they are interrupted.
running=()
start() {
  set -m
  "$@" &
  set +m
  running+=($!)
}
finish() {
  local process
  for process in "${running[@]}"; do wait "$process"; done
  running=()
}
stop() {
  local process
  for process in ${running[@]+"${running[@]}"}; do kill -INT -- "-$process" 2> /dev/null || true; done
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# 1. Prompts, divided among the shards. Two thirds are answered greedily, one third is sampled.
prompts=${PROMPTS:-20000}
[ "$prompts" = 0 ] && writing_shards=0 || writing_shards=$shards
[ -s "$out/prompts.jsonl" ] || [ "$prompts" = 0 ] || {
  python "$here/smollm2_prompts.py" "$data" "$out/prompts.jsonl.part" "$prompts"
  mv "$out/prompts.jsonl.part" "$out/prompts.jsonl"
}
for ((shard = 0; shard < writing_shards; shard++)); do
  awk -v n="$shards" -v k="$shard" 'NR % n == k && int(NR / n) % 3 != 2' "$out/prompts.jsonl" \
    > "$out/prompts-greedy-$shard.jsonl"
  awk -v n="$shards" -v k="$shard" 'NR % n == k && int(NR / n) % 3 == 2' "$out/prompts.jsonl" \
    > "$out/prompts-sampled-$shard.jsonl"
done

# 2. Answers of the target.
answer() { # shard, greedy or sampled, then options of `paceline train sample`
  local shard=$1 how=$2
  shift 2
  paceline train sample --model "$model" --data "$out/prompts-$how-$shard.jsonl" \
    --out "$out/written-$how-$shard.jsonl" --max-tokens "${TOKENS:-256}" --max-prompt-len 640 \
    --max-batch-size 48 --dtype bfloat16 --kv-cache-memory 2GB --seed "$shard" "$@"
}
threads=()
[ "$shards" -gt 1 ] && threads=(--threads 1)
answer_shard() { # shard
  trap - EXIT INT TERM
  answer "$1" greedy ${threads[@]+"${threads[@]}"}
  answer "$1" sampled --temperature 0.8 --top-p 0.95 ${threads[@]+"${threads[@]}"}
}
for ((shard = 0; shard < writing_shards; shard++)); do start answer_shard "$shard"; done
finish

# Three quarters of the data are public texts, which are prefilled instead of generated token by
# token. Of the target's answers, greedy ones have two thirds of the weight, whatever their number.
data_options=(--model "$model" --exclude-license=-SA --exclude-license CDLA)
for file in chat=15 math=9 code=7.5 summ=4.5; do
  data_options+=(--data "$data/${file%=*}.train.jsonl.gz=${file#*=}")
done
[ "$model" != paceline/smollm2 ] || data_options+=(--data "$here/data/smollm2-greedy.jsonl.gz=6" --data "$here/data/smollm2-sampled.jsonl.gz=1")
for ((shard = 0; shard < writing_shards; shard++)); do
  data_options+=(--data "$out/written-greedy-$shard.jsonl=2" --data "$out/written-sampled-$shard.jsonl=1")
done
for set in mt_bench gsm8k humaneval spec_bench; do
  [ -z "${VALID:-}" ] || data_options+=(--valid "$VALID/$set.jsonl")
done

# 3. Drafters. All positions learn the first drafted token, every third one learns all four.
start paceline train eagle3 "${data_options[@]}" --draft-vocab-size 12288 --seq-len 1024 --long-every 0 \
  --batch-tokens 4000 --micro-tokens 1200 --cache-features --lr 0.003 --adam-lr 0.0009 --warmup 30 \
  --ttt-steps 4 --stride 3 --steps "${EAGLE_STEPS:-5000}" ${EAGLE_INIT:+--init "$EAGLE_INIT"} \
  --out "$out/eagle3" "$@"
finish
start paceline train medusa "${data_options[@]}" --medusa-heads 4 --medusa-layers 1 --shared-head --seq-len 896 --long-every 0 \
  --out "$out/medusa" --steps "${MEDUSA_STEPS:-500}" "$@"
finish
start paceline train draft "${data_options[@]}" --hidden-size 192 --layers 2 --heads 3 --kv-heads 3 \
  --ffn-size 512 --argmax-weight 0.3 --seq-len 512 --batch-tokens 4096 --max-positions 2048 \
  --out "$out/draft" --steps "${DRAFT_STEPS:-1000}" "$@"
finish

echo "the head is in $out/eagle3/head: paceline generate --model $model --draft eagle3:$out/eagle3/head"
