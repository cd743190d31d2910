#!/usr/bin/env bash
# Trains a small transformer with backend="cgpass", in an environment that it sets up: $CGPASS_VENV or .venv, never the
# active one. Arguments go to examples/train_transformer.py: see --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

VIRTUAL_ENV="" prepare_venv demo
HF_HUB_OFFLINE=1 exec "$PYTHON" examples/train_transformer.py "$@"
