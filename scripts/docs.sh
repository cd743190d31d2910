#!/usr/bin/env bash
# Builds the documentation as a site into build/site; a link, a public name or a file that is missing is an error. Names are
# read from the sources, so torch is not needed. The virtual environment is .venv-docs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

directory=.venv-docs
[[ -x $directory/bin/python ]] || create_venv "$directory"
python=$directory/bin/python
wanted=$("$python" -c 'import pathlib, tomllib
for each in tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]:
    print(each)')
stamp=$directory/.cgpass-setup
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "== installing what the documentation is built with into $directory"
  "$python" -m pip install --quiet --disable-pip-version-check -r /dev/stdin <<<"$wanted"
  echo "$wanted" >"$stamp"
fi
echo "== documentation"
NO_MKDOCS_2_WARNING=1 PATH="$PWD/$directory/bin:$PATH" "$python" -m mkdocs build --strict
echo "built strictly: build/site/index.html"
