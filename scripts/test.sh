#!/usr/bin/env bash
# Style checks and the test suite: bash scripts/test.sh [pytest arguments]
# With MOSAICKV_TEST_OLDEST=1 the quick tests then run again with the oldest supported Transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Two processes of one thread each: tests are mostly small operations, which threads do not speed up.
run_tests() {
    OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --durations 20 "$@"
}

(
    source scripts/env.sh
    install_extras test eval harness
    ruff check .
    ruff format --check .
    run_tests "$@"
)

if [[ "${MOSAICKV_TEST_OLDEST:-0}" == 1 ]]; then
    (
        VENV="${VENV:-.venv}-oldest"
        CONSTRAINTS=constraints-oldest.txt
        source scripts/env.sh
        install_extras test
        echo "Again with the oldest supported Transformers ($(python -m pip list 2>/dev/null | awk '$1 == "transformers" {print $2}'))"
        # What does not know of Transformers has been tested above.
        run_tests -m "not slow" --ignore tests/evaluation --ignore tests/test_triton_kernels.py \
            --ignore tests/test_cpu_kernels.py --ignore tests/test_packing.py --ignore tests/test_attention.py
    )
fi
