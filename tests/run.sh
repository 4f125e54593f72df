#!/usr/bin/env bash
# Lint, type check and test. Needs nothing but Python 3.11 and a C++ compiler: makes .venv by itself.
#
#   bash tests/run.sh             the default tests
#   bash tests/run.sh quick       only those that start no processes (under a minute)
#   bash tests/run.sh all         the slow ones and the GPU ones too
#   bash tests/run.sh -k plan -x  further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    quick) marks="not slow and not gpu and not ranks"; shift ;;
    all) marks=""; shift ;;
    *) marks="not slow and not gpu" ;;
esac

bash tests/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" # DeepSpeed looks for ninja there
export TORCH_EXTENSIONS_DIR="$PWD/.cache/torch_extensions" OMP_NUM_THREADS=1
if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }; then export DS_ACCELERATOR=cpu; fi

build_comm_op() { # every init_distributed on a CPU wants it; built here, ranks don't build it at the same time
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    # a build that was killed leaves its lock, and whoever needs the op waits for that lock for ever
    find "$TORCH_EXTENSIONS_DIR" -name lock -delete
    if [ -z "$(find "$TORCH_EXTENSIONS_DIR" -name 'deepspeed_shm_comm.so' -print -quit)" ]; then
        echo "run: building DeepSpeed's communication op, once (about a minute)"
    fi
    python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >.cache/build_comm_op.log 2>&1 ||
        { cat .cache/build_comm_op.log >&2; echo "run: the op could not be built; is there a C++ compiler (g++)?" >&2; exit 1; }
}

code=0
check() {
    echo "run: $*"
    "$@" || code=$?
}
check ruff format --check --quiet .
check ruff check .
check pyright --warnings
if [ "${marks#*not ranks}" = "$marks" ]; then check bash tests/wheel.sh; fi
if [ "${marks#*not ranks}" = "$marks" ]; then build_comm_op; fi
check python -m pytest -m "$marks" -rs --durations=10 "$@"
exit "$code"
