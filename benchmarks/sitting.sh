#!/usr/bin/env bash
# What half an hour on an H200 should measure, in three calls of less than ten minutes each:
#
#     OUT=out bash benchmarks/sitting.sh 1      # then 2, then 3
#     OUT=out bash benchmarks/sitting.sh try    # every kind of row in small, without a GPU
#
# Rows go to $OUT/rows.jsonl as they are measured. Append them to benchmarks/results/gpu-h200.jsonl and
# commit that after each call: nothing of a sitting that is cut off is lost then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=src:tests/support:benchmarks PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}
PYTHON=${PYTHON:-python3}
began=$SECONDS

case ${1:-} in
    1) part=first ;;
    2) part=second ;;
    3) part=third ;;
    try) part=try ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
mkdir -p "${OUT:?set OUT to a folder for what is measured}" || exit 1

row() { # seconds at most, then what gpu.py shall measure
    timeout "$1" "$PYTHON" benchmarks/gpu.py run "${@:2}" --json "$OUT/rows.jsonl" 2>&1
    echo "== after $((SECONDS - began)) s"
}

passes() { # seconds at most, then tests
    timeout "$1" "$PYTHON" -m pytest -q -p no:cacheprovider "${@:2}" 2>&1
    echo "== after $((SECONDS - began)) s"
}

replayed=(--peers checkpoint every2 --shares 100 80 60 --warm 10 --timed 4)
compiled=(--engines inductor --peers regional-0.5 regional-0.2 regional+checkpoint --shares 100
    --warm 8 --timed 4 --kernels)

first() { # what nobody has seen on a GPU yet, and the one row that misses its must
    passes 90 tests/gpu/test_loss_gpu.py tests/gpu/test_inductor_gpu.py
    row 340 resnet152 --engines inductor --peers regional-0.2 --variants exact no-offload \
        --rounds 5 --timed 12 --kernels
    # 28 % is what save_on_cpu takes.
    row 140 bert-large --peers checkpoint every2 --shares 80 60 28 --warm 10 --timed 4 \
        --variants exact inexact whole-loss
}

second() { # the loss in chunks under replay, and a step that the CPU issues late
    row 130 gpt2-medium "${replayed[@]}"
    row 150 llama-1b "${replayed[@]}"
    row 100 resnet152 "${replayed[@]}"
    row 90 bert-large --batch 16 --peers checkpoint every2 --rounds 3 --timed 10 --warm 20
    timeout 40 "$PYTHON" benchmarks/loss_in_chunks.py time --rounds 5 2>&1
}

third() { # compiled blocks with the loss in chunks
    row 170 bert-large "${compiled[@]}"
    row 170 gpt2-medium "${compiled[@]}"
    row 200 llama-1b "${compiled[@]}"
}

try() {
    passes 90 tests/gpu/test_loss_gpu.py
    row 100 gpt2-mini --batch 2 --device cpu --peers checkpoint --shares 100 60 --warm 1 --timed 1 \
        --variants exact whole-loss
    row 100 bert-tiny --device cpu --peers checkpoint --rounds 2 --warm 1 --timed 1 \
        --variants exact no-offload
}

"$part" | tee "$OUT/log-$1.txt"
