#!/usr/bin/env bash
# Style checks and the test suite: bash scripts/test.sh [pytest arguments]
# With MOSAICKV_TEST_OLDEST=1 the quick tests then run again with the oldest supported Transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(
    source scripts/env.sh
    install_extras test eval harness
    ruff check .
    ruff format --check .
    python -m pytest "$@"
)

if [[ "${MOSAICKV_TEST_OLDEST:-0}" == 1 ]]; then
    (
        VENV="${VENV:-.venv}-oldest"
        CONSTRAINTS=constraints-oldest.txt
        source scripts/env.sh
        install_extras test
        echo "Again with the oldest supported Transformers ($(python -m pip list 2>/dev/null | awk '$1 == "transformers" {print $2}'))"
        python -m pytest -m "not slow" --ignore tests/evaluation
    )
fi
