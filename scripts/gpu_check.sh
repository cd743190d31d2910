#!/usr/bin/env bash
# Checks and measures cgpass on a machine with a CUDA device; each part writes a log and a JSON into a folder.
#
#   bash scripts/gpu_check.sh --part PART [--out DIR] [-- extra arguments]
#
#   tests       the GPU tests, in parallel over one compile cache; extra arguments go to pytest
#   dist        the tests that need several devices
#   bench       training steps and memory of the models; extra arguments of this and all below go to bench.py
#   inference   calls of the models without gradients
#   overhead    host time of stacks of 1, 10 and 100 small layers
#   step        whole steps by cgpass.train_step, against pieces and a graph by hand
#   depths      whole steps over width and depth
#   graphed     callables graphed by hand, against torch's
#   recompute   recomputed random operators, and what checkpoints save
#   start       seconds until a model trains from graphs, cold and in a second process
#
# `-- --baseline DIR` measures another checkout beside this one, and fails where this one is slower.
# `python scripts/results.py --take DIR` keeps all of it in docs/results.
#
# Each part ends within nine minutes. PYTHON names the interpreter (python3), WORKERS the number of pytest's processes
# (8), LIMIT the seconds after which a part is interrupted (520); what is known by then is written. BENCH_COMMIT names the
# commit where the sources are a copy without history.
set -u -o pipefail

usage() { sed -n '2,24s/^# \{0,1\}//p' "$0"; }

part="" out="gpu-check" workers="${WORKERS:-8}" limit="${LIMIT:-520}"
while [ $# -gt 0 ]; do
  case "$1" in
    --part) part="${2:-}"; shift 2 || { usage; exit 2; } ;;
    --out) out="${2:-}"; shift 2 || { usage; exit 2; } ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) echo "unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
done

root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "$out" || exit 2
out="$(cd "$out" && pwd)"
cd "$root" || exit 2
python="${PYTHON:-python3}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# The backend's name is found through package metadata; a checkout that isn't installed has none.
meta="$scratch/site/cgpass-0+checkout.dist-info"
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: cgpass\nVersion: 0+checkout\n' >"$meta/METADATA"
printf '[torch_dynamo_backends]\ncgpass = cgpass.backend:cgpass\n' >"$meta/entry_points.txt"

export PYTHONPATH="$root:$root/scripts:$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$scratch/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$scratch/triton}"

have() { "$python" -c "import $1" >/dev/null 2>&1; }

# run_pytest WORKERS MARKS ARGUMENTS... : files that need a package which this machine lacks are left out, and named.
run_pytest() {
  local workers="$1" marks="$2" options=()
  shift 2
  for package in expecttest hypothesis transformers timm; do
    have "$package" && continue
    while IFS= read -r file; do
      echo "left out: $file: $package is not installed"
      options+=("--ignore=$file")
    done < <(grep -lE "^(import|from) $package\b" -r tests --include='test_*.py')
  done
  have pytest_timeout && options+=(--timeout=240)
  if [ "$workers" -gt 1 ] && have xdist; then
    options+=(-n "$workers" --dist worksteal)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-2}"
  fi
  timeout --signal=INT --kill-after=15 "$limit" "$python" -m pytest -v -m "$marks" -o junit_family=xunit1 \
    --junitxml="$scratch/report.xml" -p no:cacheprovider -p no:benchmark --tb=short ${options[@]+"${options[@]}"} tests "$@"
  "$python" -m benchlib.check --part "$part" --status $? --out "$out/$part.json" "$scratch/report.xml"
}

run_bench() {
  timeout --signal=INT --kill-after=15 "$((limit + 15))" "$python" scripts/bench.py --budget "$limit" \
    --out "$out/$part.json" "$@"
}

run_part() {
  case "$part" in
    tests) run_pytest "$workers" "gpu and not multigpu" "$@" ;;
    dist) run_pytest 1 multigpu "$@" ;;
    bench) run_bench --rounds 4 "$@" ;;
    inference) run_bench --modes inference --arms default reduce-overhead cgpass "$@" ;;
    overhead)
      run_bench --modes inference train --models stack1 stack10 stack100 --arms eager default reduce-overhead cgpass \
        --steps 20 --rounds 10 "$@" ;;
    step) run_bench --models mlp3 mlp50 actor_critic gpt2 vit_small resnet50 --rounds 3 \
        --arms reduce-overhead cgpass cgpass-step limit-step "$@" ;;
    depths) run_bench --models mlp_{64,256,1024}x{3,12,50} --rounds 2 --arms default reduce-overhead cgpass cgpass-step "$@" ;;
    graphed) run_bench --models layer --arms eager graphed torch-graphed --steps 50 --rounds 20 "$@" ;;
    recompute)
      run_bench --models attentions blocks blocks_torch blocks_cgpass \
        --arms eager default reduce-overhead cgpass cgpass:rng=paired "$@" ;;
    start) run_bench --modes start --models gpt2 llama vit_small mixtral --arms default reduce-overhead cgpass "$@" ;;
    *) echo "unknown part: '$part'" >&2; usage >&2; return 2 ;;
  esac
}

run_part "$@" 2>&1 | tee "$out/$part.log"
