#!/usr/bin/env bash
# Trains a small transformer with backend="cgpass", in the active environment if that has cgpass and transformers, else
# in one that it sets up: $CGPASS_VENV or .venv. An active environment is never changed.
# Arguments go to examples/train_transformer.py: see --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

use_active_venv cgpass transformers || VIRTUAL_ENV="" prepare_venv demo
HF_HUB_OFFLINE=1 exec "$PYTHON" examples/train_transformer.py "$@"
