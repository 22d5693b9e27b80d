#!/usr/bin/env bash
# One command from a fresh clone to a model that decodes with MosaicKV: bash scripts/quickstart.sh
# Arguments go to scripts/quickstart.py (--help lists them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
install_extras demo
exec python scripts/quickstart.py "$@"
