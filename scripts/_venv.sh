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

wanted_stamp() {
  local extra=$1 torch=$2
  echo "$PWD extra=$extra torch=${torch:-any} $(cksum <pyproject.toml)"
}

# use_active_venv MODULE... takes the active environment as it is, if it has all of these. Nothing is installed into it.
use_active_venv() {
  [[ -z ${CGPASS_VENV:-} && -x ${VIRTUAL_ENV:-}/bin/python ]] || return 1
  local lacking
  lacking=$("$VIRTUAL_ENV/bin/python" -I -c \
    'import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if not find_spec(m)))' "$@")
  if [[ -n $lacking ]]; then
    echo "== the active environment lacks $lacking and is left alone: .venv is used (pip install -e '.[demo]' adds it)"
    return 1
  fi
  PYTHON=$VIRTUAL_ENV/bin/python
  tell_python
}

tell_python() {
  "$PYTHON" -c 'import sys, torch; print("== Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.cuda.is_available())'
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
  wanted=$(wanted_stamp "$extra" "$torch")
  if [[ -f $stamp && $extra == demo && $(<"$stamp") == "$(wanted_stamp dev "$torch")" ]]; then
    wanted=$(<"$stamp") # which has all that the demo needs
  fi
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "== installing cgpass[$extra] into $directory (the first time 1 to 3 minutes and up to 6 GB, most of it torch)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
      ${torch:+"torch==$torch"} -e ".[$extra]"
    echo "$wanted" >"$stamp"
  fi
  tell_python
}
