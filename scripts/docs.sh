#!/usr/bin/env bash
# Builds the documentation as a site into build/site; a link, a public name or a file that is missing is an error. Names are
# read from the sources, so torch is not needed. The virtual environment is .venv-docs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

mapfile -t packages < <(python3 -c 'import tomllib
for each in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]:
    print(each)')
install_once .venv-docs "${packages[@]}"
echo "== documentation"
NO_MKDOCS_2_WARNING=1 PATH="$PWD/.venv-docs/bin:$PATH" python -m mkdocs build --strict
echo "built strictly: build/site/index.html"
