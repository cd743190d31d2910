#!/usr/bin/env bash
# Sets up a virtual environment and runs all checks; fails if one of them fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

usage() {
  cat <<'END'
usage: bash scripts/test.sh [--torch VERSION] [PYTEST ARGUMENTS...]

Sets up a virtual environment ($CGPASS_VENV, else the active one, else .venv) and runs ruff, pyrefly and
the tests. Tests that need CUDA skip themselves where there is none.

  --torch VERSION   with this torch, in an environment of its own (.venv-torch-VERSION)
  -h, --help        this text

Other arguments go to pytest, e.g. -k options. On 2 idle cores it takes 8 minutes: 1 minute to install (once, some GB),
10 s of ruff and pyrefly, 6 minutes of tests.
END
}

torch=
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --torch) torch=${2:?--torch needs a version, e.g. 2.11.0} && shift 2 ;;
    *) break ;;
  esac
done

directory=${CGPASS_VENV:-${torch:+.venv-torch-$torch}}
directory=${directory:-${VIRTUAL_ENV:-.venv}}
install_once "$directory" ${torch:+"torch==$torch"} -e ".[dev]"
PYTHON=$(cd "$directory/bin" && pwd)/python
"$PYTHON" -c 'import sys, torch; print("== Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.cuda.is_available())'

# What cgpass compiles at first use is compiled once, beside the first checks, and not by each process of pytest.
"$PYTHON" -m cgpass build >/dev/null &
building=$!

echo "== ruff and pyrefly: 10 s; then the tests: all of them take 6 minutes on 2 idle cores"
failed=()
check() {
  echo "== $1"
  "${@:2}" || failed+=("$1")
}
check "ruff check" "$PYTHON" -m ruff check
check "ruff format" "$PYTHON" -m ruff format --check --quiet
check "pyrefly" "$PYTHON" -m pyrefly check --python-interpreter-path "$PYTHON"
wait "$building" || true
# One thread each: two processes of as many threads as there are cores would only be in each other's way.
# Neighbours stay together, and share what their file made. A test that hangs fails, and shows where each thread is.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" check "pytest" "$PYTHON" -m pytest -n auto --maxprocesses 4 --dist worksteal \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true "$@"

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all checks passed"
