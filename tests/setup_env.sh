#!/usr/bin/env bash
# Make .venv in the checkout, with all that tests and examples need. Idempotent: returns at once when it is up to date.
#
#   bash tests/setup_env.sh
#
# PYTHON        the Python 3.11 to use (found by itself otherwise)
# TORCH_SPEC    another torch requirement, for a machine where the one below can't be had
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 is needed, and neither python3.11 nor python3 is one. Install it, or name it in PYTHON."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

TORCH='torch==2.13.0'
# On Linux x86_64 the plain version is a CUDA build of several GB. The local version label makes a resolver fail instead.
if ! has_gpu && [ "$(uname -sm)" = "Linux x86_64" ]; then TORCH='torch==2.13.0+cpu'; fi
TORCH="${TORCH_SPEC:-$TORCH}"

stamp=.venv/.megatron_ucp_stamp
wanted=$(cat setup.py pyproject.toml tests/setup_env.sh <(printf '%s' "$TORCH") | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then exit 0; fi

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "setup: making .venv with $python"
    "$python" -m venv .venv || fail "could not make .venv (on Debian: apt install python3.11-venv)"
fi
echo "setup: installing $TORCH, DeepSpeed, Megatron-Core, Transformers and the development tools (minutes, the first time)"
# One call: a second one could replace torch by what another package prefers.
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    "$TORCH" deepspeed==0.19.8 megatron-core==0.16.1 'transformers>=5,<6' 'isal>=1.9' 'numpy>=1.26' 'safetensors>=0.4' 'tqdm>=4.60' \
    'setuptools>=68' wheel ninja 'pytest>=8' 'hypothesis>=6.100' ruff==0.17.5 pyright==1.1.414 'pre-commit>=4' \
    'matplotlib>=3.8' 'accelerate>=1' 'psutil>=5.9' 'tensorboard>=2.16' ||
    fail "pip could not install the packages (see above). If it did not find $TORCH: add PyTorch's own wheel index," \
        "as https://pytorch.org/get-started/locally names it for pip and CPU, with PIP_EXTRA_INDEX_URL;" \
        "or set TORCH_SPEC=torch==2.13.0 to take whatever build is found."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
