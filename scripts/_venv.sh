# Shared set-up of the other scripts; sourced, not run.
#
# prepare_venv EXTRA [TORCH_VERSION] makes a virtual environment that has cgpass (editable), the
# extra EXTRA and torch, and leaves the path of its interpreter in $PYTHON. The environment is, in
# this order: $CGPASS_VENV; with a torch version .venv-torch-VERSION; the active one; .venv, made with python3.
# Where nothing changed since the last set-up nothing is installed.

create_venv() {
  echo "== creating $1"
  # Debian's Python comes without ensurepip: then pip is put in by the pip outside.
  if ! python3 -m venv "$1" >/dev/null 2>&1; then
    python3 -m venv --clear --without-pip "$1"
    python3 -m pip --python "$1/bin/python" install --quiet pip
  fi
}

prepare_venv() {
  local extra=$1 torch=${2:-} directory wanted stamp
  if [[ -n ${CGPASS_VENV:-} ]]; then
    directory=$CGPASS_VENV
  elif [[ -n $torch ]]; then
    directory=.venv-torch-$torch
  else
    directory=${VIRTUAL_ENV:-.venv}
  fi
  [[ -x $directory/bin/python ]] || create_venv "$directory"
  PYTHON=$(cd "$directory/bin" && pwd)/python

  stamp=$directory/.cgpass-setup
  wanted="$PWD extra=$extra torch=${torch:-any} $(cksum <pyproject.toml)"
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "== installing cgpass[$extra] into $directory (the first time 1 to 3 minutes and up to 6 GB, most of it torch)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
      ${torch:+"torch==$torch"} -e ".[$extra]"
    echo "$wanted" >"$stamp"
  fi
  "$PYTHON" -c 'import sys, torch; print("== Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.cuda.is_available())'
}
