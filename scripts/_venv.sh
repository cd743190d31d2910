# install_once DIRECTORY ARGUMENTS... makes a virtual environment and has its pip install the arguments; sourced by the
# other scripts, not run. Where nothing changed since the last time nothing is installed.

install_once() {
  local directory=$1 stamp=$1/.cgpass-setup wanted
  wanted="$PWD ${*:2} $(cksum <pyproject.toml)"
  if [[ ! -x $directory/bin/python ]]; then
    echo "== creating $directory"
    # Debian's Python comes without ensurepip: then pip is put in by the pip outside.
    if ! python3 -m venv "$directory" >/dev/null 2>&1; then
      python3 -m venv --clear --without-pip "$directory"
      python3 -m pip --python "$directory/bin/python" install --quiet pip
    fi
  fi
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "== installing ${*:2} into $directory (with torch 1 to 3 minutes and up to 6 GB the first time)"
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
    echo "$wanted" >"$stamp"
  fi
}
