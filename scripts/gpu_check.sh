#!/usr/bin/env bash
# Checks and measures cgpass on a machine with a CUDA device; one JSON per part into a folder.
#
#   bash scripts/gpu_check.sh --part PART [--out DIR] [-- extra arguments]
#
#   tests   the GPU tests, in parallel over one shared compile cache; extra arguments go to pytest
#   bench   step times of all models and arms, captured and total kernels; extra go to bench.py
#   memory  peak memory and compile time, one process per arm; extra arguments go to bench.py
#   inference  host time of calls of all models without gradients; extra arguments go to bench.py
#   overhead  host time of calls of stacks of small layers; extra arguments go to bench_overhead.py
#   graphed  host time of callables graphed by hand; extra arguments go to bench_graphed.py
#   recompute  what recomputed random operators cost and checkpoints save; extra go to bench_recompute.py
#   start   seconds until a model trains from graphs, cold and in a second process; extra go to bench_start.py
#   dist    the tests that need several devices; with one device says so
#   dist-bench  steps and memory on two devices; extra arguments go to bench_distributed.py; with one device says so
#
# `python scripts/results.py --take DIR` keeps all of it in docs/results and brings README in step. With
# `-- --compare OLD.json` bench, memory, inference and overhead fail where cgpass got worse than in an older result.
#
# Each part takes less than nine minutes. PYTHON names the interpreter (python3), WORKERS the number of processes (8),
# LIMIT the seconds after which tests are interrupted (520); what failed by then is reported. BENCH_COMMIT names the
# commit where the sources are a copy without history.
set -u -o pipefail

usage() { sed -n '2,22s/^# \{0,1\}//p' "$0"; }

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

# Files that need a package this machine lacks would fail to import: left out, and named.
left_out=() ignored=()
leave_out_what_needs() {
  have "$1" && return
  while IFS= read -r file; do
    ignored+=("--ignore=$file")
    left_out+=("$file: $1 is not installed")
  done < <(grep -lE "^(import|from) $1\b" -r tests --include='test_*.py' 2>/dev/null)
}

# run_pytest NAME LIMIT_S MARKS PATH... : writes NAME.xml and NAME.log into the folder.
run_pytest() {
  local name="$1" limit="$2" marks="$3"
  shift 3
  local parallel=()
  if [ "$workers" -gt 1 ] && have xdist; then
    parallel=(-n "$workers" --dist worksteal)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-2}"
  fi
  timeout --signal=INT --kill-after=15 "$limit" "$python" -m pytest -v -m "$marks" \
    $(have pytest_timeout && echo --timeout=240) -o junit_family=xunit1 --junitxml="$out/$name.xml" -p no:cacheprovider -p no:benchmark --tb=short \
    ${parallel[@]+"${parallel[@]}"} ${ignored[@]+"${ignored[@]}"} "$@" 2>&1 | tee "$out/$name.log"
}

summarise() {
  "$python" -m benchlib.check --part "$1" --status "$2" --out "$out/$1.json" \
    --left-out ${left_out[@]+"${left_out[@]}"} -- "$out/$1.xml"
}

devices="$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)"
"$python" -c 'import torch; print("torch", torch.__version__, "cuda devices", torch.cuda.device_count())'

case "$part" in
  tests)
    leave_out_what_needs expecttest
    leave_out_what_needs hypothesis
    leave_out_what_needs transformers
    leave_out_what_needs timm
    run_pytest tests "$limit" "gpu and not multigpu" tests "$@"
    summarise tests $?
    ;;
  dist)
    leave_out_what_needs expecttest
    if [ "$devices" -lt 2 ]; then
      echo "needs 2 GPUs, found $devices: the distributed tests are not run"
      left_out+=("every multigpu test: needs 2 GPUs, found $devices")
      : >"$out/dist.xml" && rm -f "$out/dist.xml"
      summarise dist 5
    else
      workers=1
      run_pytest dist "$limit" multigpu tests "$@"
      summarise dist $?
    fi
    ;;
  bench | memory | inference)
    flags=(--budget 510 --out "$out/$part.json" --markdown "$out/$part.md")
    [ "$part" = bench ] || flags+=("--$part")
    timeout --signal=INT --kill-after=15 535 "$python" scripts/bench.py "${flags[@]}" "$@" 2>&1 \
      | tee "$out/$part.log"
    ;;
  overhead)
    flags=(--json "$out/overhead.json" --markdown "$out/overhead.md")
    timeout --signal=INT --kill-after=15 535 "$python" scripts/bench_overhead.py "${flags[@]}" "$@" \
      2>&1 | tee "$out/overhead.log"
    ;;
  graphed | recompute | start)
    timeout --signal=INT --kill-after=15 535 "$python" "scripts/bench_$part.py" \
      --json "$out/$part.json" "$@" 2>&1 | tee "$out/$part.log"
    ;;
  dist-bench)
    if [ "$devices" -lt 2 ]; then
      echo "needs 2 GPUs, found $devices: nothing is measured"
    else
      timeout --signal=INT --kill-after=15 480 "$python" scripts/bench_distributed.py \
        --json "$out/dist-bench.json" "$@" 2>&1 | tee "$out/dist-bench.log"
    fi
    ;;
  *)
    echo "unknown part: '$part'" >&2
    usage >&2
    exit 2
    ;;
esac
