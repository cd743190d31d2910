#!/usr/bin/env bash
# Sets up a virtual environment and trains a small transformer with backend="cgpass".
# Arguments go to examples/train_transformer.py: see --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

prepare_venv dev
HF_HUB_OFFLINE=1 exec "$PYTHON" examples/train_transformer.py "$@"
