#!/usr/bin/env bash
# Builds zoo on a machine with a GPU, runs the tests there, and writes what it measured under $OUT.
# usage: bash tests/gpu/run.sh [fast]     fast: no compute-sanitizer, no benchmarks
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-gpu-results}
mkdir -p "$OUT"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0a}
unset CC CXX CUDAHOSTCXX  # the system's own compiler; the build refuses one with a static libstdc++
status=0
step() {
  echo "== $1"
  shift
  local begin=$SECONDS
  "$@" || { status=1; echo "== FAILED: $*"; }
  echo "== $((SECONDS - begin)) s"
}
step build bash -c 'python3 setup.py build_ext --inplace > "$0/build.log" 2>&1 || { tail -40 "$0/build.log"; false; }' "$OUT"
# all that may share the GPU, five at once; then what measures times, alone
step tests python3 -m pytest -q --durations=12 -n 5 --maxschedchunk 2 tests/ops tests/gpu -p no:cacheprovider
step "tests of times" python3 -m pytest -q --durations=12 -m quiet tests/gpu -p no:cacheprovider
if [ "${1:-}" != fast ]; then
  # every operator on ragged shapes, under the checkers
  for tool in memcheck racecheck synccheck initcheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 --log-file "$OUT/$tool.log" python3 tests/gpu/sanitized.py
    tail -1 "$OUT/$tool.log"
  done
  step "bench linear" python3 -m zoo bench linear --dtype f32,bf16,f16,f64 --precision highest,high --peer eager --json "$OUT/h200-linear.json"
  step "bench model" python3 -m zoo bench model timm/vit_base_patch16_224 timm/mixer_b16_224 timm/convnext_tiny --phase train --json "$OUT/h200-models.json"
  step "mlp unit" python3 examples/mlp_unit.py --json "$OUT/h200-mlp-unit.json"
  step ladder python3 examples/ladder/ladder.py --json "$OUT/h200-ladder.json"
fi
exit $status
