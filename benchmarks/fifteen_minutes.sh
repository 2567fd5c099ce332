#!/usr/bin/env bash
# Fifteen minutes on one GPU, in two calls of 595 and 195 seconds: `first`, then `second` on the same warm machine.
# Before: a clean tree, and the wheel: pip download --no-deps -d .whl torchao==0.18.0. Results in $OUT, a folder.
# `tiny` tries all of it on any machine, but for what needs a GPU.
set -uo pipefail
mode=${1:?first, second or tiny}
out=${OUT:-benchmarks/results/first_hour}
python=${PYTHON:-python3}
more=()
[ "$mode" = tiny ] && more=(--tiny)
if compgen -G '.whl/*.whl' >/dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .whl/*.whl
  export PYTHONPATH=/tmp/site:.
fi
hour() { # SECONDS ARGUMENTS: the run ends itself ten seconds before it would be killed
  timeout "$1" "$python" -m benchmarks.first_hour --out "$out" --budget $(($1 - 10)) "${more[@]}" "${@:2}"
}
names() { printf -- '--only\n%s\n' "$@"; }
mapfile -t five < <(names bf16 tensorwise delayed rowwise 'torchao tensorwise')
mapfile -t variants < <(names 'tensorwise, save memory' 'tensorwise, fast accumulation' 'tensorwise, head in FP8')
mapfile -t tokens < <(names bf16 tensorwise delayed rowwise 'rowwise, FP8 checkpoint')
mapfile -t graphs < <(names 'bf16, CUDA graphs' 'tensorwise, CUDA graphs' 'tensorwise, where it pays')
if [ "$mode" != second ]; then
  hour 385 table:240 layers:125 "${five[@]}" "${variants[@]}"
  hour 195 decode:95 smallest:80 --widths 768 1536 "${tokens[@]}" "${graphs[@]}"
fi
if [ "$mode" != first ]; then
  hour 60 linears:45 "${five[@]}"
  hour 85 layers:70 --only bf16 --only tensorwise --only 'bf16, max-autotune'
fi
[ "$mode" = second ] || exit 0
timeout 20 "$python" -m fp8graph bench --calibrate "$out/speed.json"
timeout 30 "$python" -m benchmarks.blocks "$out/blocks.jsonl"
