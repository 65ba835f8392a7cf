#!/usr/bin/env bash
# Trains what drafts for SmolLM2-135M-Instruct: an EAGLE-3 head, Medusa heads and a small draft
# model, on public instruction text, as the target's chat template writes it, and on answers that
# the target writes itself to prompts from a folder of corpus files. 8,043 of these are kept in
# recipes/data, so that PROMPTS=0 writes none.
#
#   recipes/smollm2.sh DATA_FOLDER OUT_FOLDER [options that every `paceline train` knows]
#
# Every stage resumes where it was cut off when the same command is run again. MODEL is the target,
# PROMPTS how many questions it is asked, TOKENS how long it may answer, SHARDS how many processes
# answer side by side (one a core; 1 on a GPU); EAGLE_STEPS, MEDUSA_STEPS and DRAFT_STEPS
# set the length of the training. VALID is a folder of held-out prompts (mt_bench.jsonl
# and others), if there is one.
#
# To go on from the shipped head, without writing answers; give another seed, or the same texts come first again:
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

# What runs is a process group of its own, so that nothing goes on writing once this script has
# ended, however it ends; all of it saves when it is interrupted.
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

# 1. Questions, dealt out: of each shard's three parts two are answered greedily, one sampled.
prompts=${PROMPTS:-20000}
[ "$prompts" = 0 ] && shards_that_write=0 || shards_that_write=$shards
[ -s "$out/prompts.jsonl" ] || [ "$prompts" = 0 ] || {
  python "$here/smollm2_prompts.py" "$data" "$out/prompts.jsonl.part" "$prompts"
  mv "$out/prompts.jsonl.part" "$out/prompts.jsonl"
}
for ((shard = 0; shard < shards_that_write; shard++)); do
  awk -v n="$shards" -v k="$shard" 'NR % n == k && int(NR / n) % 3 != 2' "$out/prompts.jsonl" \
    > "$out/prompts-greedy-$shard.jsonl"
  awk -v n="$shards" -v k="$shard" 'NR % n == k && int(NR / n) % 3 == 2' "$out/prompts.jsonl" \
    > "$out/prompts-sampled-$shard.jsonl"
done

# 2. Answers by the target, some of them asked about again.
answer() { # shard, greedy or sampled, then options of `paceline train sample`
  local shard=$1 how=$2
  shift 2
  paceline train sample --model "$model" --data "$out/prompts-$how-$shard.jsonl" \
    --out "$out/written-$how-$shard.jsonl" --max-tokens "${TOKENS:-256}" --max-prompt-len 640 \
    --follow-ups 0.15 --max-batch-size 48 --dtype bfloat16 --kv-cache-memory 2GB --seed "$shard" "$@"
}
threads=()
[ "$shards" -gt 1 ] && threads=(--threads 1)
both() { # shard
  trap - EXIT INT TERM
  answer "$1" greedy ${threads[@]+"${threads[@]}"}
  answer "$1" sampled --temperature 0.8 --top-p 0.95 ${threads[@]+"${threads[@]}"}
}
for ((shard = 0; shard < shards_that_write; shard++)); do start both "$shard"; done
finish

# Three parts of four are teacher-forced: read at the speed of a prompt, not written token by token.
# Of what the target wrote, greedy answers weigh two thirds, whatever their number.
own=(--model "$model" --exclude-license=-SA --exclude-license CDLA)
for file in chat=15 math=9 code=7.5 summ=4.5; do
  own+=(--data "$data/${file%=*}.train.jsonl.gz=${file#*=}")
done
[ "$model" != paceline/smollm2 ] || own+=(--data "$here/data/smollm2-greedy.jsonl.gz=6" --data "$here/data/smollm2-sampled.jsonl.gz=1")
for ((shard = 0; shard < shards_that_write; shard++)); do
  own+=(--data "$out/written-greedy-$shard.jsonl=2" --data "$out/written-sampled-$shard.jsonl=1")
done
for set in mt_bench gsm8k humaneval spec_bench; do
  [ -z "${VALID:-}" ] || own+=(--valid "$VALID/$set.jsonl")
done

# 3. What drafts. Every place learns its first drafted token; every third one goes on to the fourth.
start paceline train eagle3 "${own[@]}" --draft-vocab-size 12288 --seq-len 1024 --long-every 0 \
  --batch-tokens 4000 --micro-tokens 1200 --cache-features --lr 0.003 --adam-lr 0.0009 --warmup 30 \
  --ttt-steps 4 --stride 3 --steps "${EAGLE_STEPS:-5000}" ${EAGLE_INIT:+--init "$EAGLE_INIT"} \
  --out "$out/eagle3" "$@"
finish
start paceline train medusa "${own[@]}" --medusa-heads 4 --medusa-layers 1 --shared-head --seq-len 896 --long-every 0 \
  --out "$out/medusa" --steps "${MEDUSA_STEPS:-500}" "$@"
finish
start paceline train draft "${own[@]}" --hidden-size 192 --layers 2 --heads 3 --kv-heads 3 \
  --ffn-size 512 --argmax-weight 0.3 --seq-len 512 --batch-tokens 4096 --max-positions 2048 \
  --out "$out/draft" --steps "${DRAFT_STEPS:-1000}" "$@"
finish

echo "the head is in $out/eagle3/head: paceline generate --model $model --draft eagle3:$out/eagle3/head"
