#!/usr/bin/env bash
# Make .venv in the checkout, with all that tests and examples need. Idempotent: returns at once when it is up to date.
#
#   bash tests/setup_env.sh
#
# PYTHON        the Python to use, 3.11 to 3.13 (found by itself otherwise)
# TORCH_SPEC    another torch requirement, for a machine where the one below can't be had
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

find_python() { # 3.11 is what continuous integration runs
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed, and none of ${PYTHON:-python3.11, python3.12, python3.13 and python3} is one." \
        "Install it, or name it in PYTHON."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

PLAIN_TORCH='torch==2.13.0'
TORCH=$PLAIN_TORCH
# On Linux x86_64 the plain version is a CUDA build of several GB. The local version label makes a resolver fail instead.
if ! has_gpu && [ "$(uname -sm)" = "Linux x86_64" ]; then TORCH="$PLAIN_TORCH+cpu"; fi
TORCH="${TORCH_SPEC:-$TORCH}"

stamp=.venv/.megatron_ucp_stamp
wanted=$(cat setup.py pyproject.toml tests/setup_env.sh <(printf '%s' "$TORCH") | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then exit 0; fi

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "setup: making .venv with $python"
    "$python" -m venv .venv || fail "could not make .venv (on Debian: apt install python3-venv, or python3.11-venv for 3.11)"
fi
echo "setup: installing $TORCH, DeepSpeed, Megatron-Core, Transformers and the development tools (minutes, the first time)"
said=$(mktemp)
trap 'rm -f "$said"' EXIT
install() { # in one call: a second one could replace torch by what another package prefers
    local code=0
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        "$1" deepspeed==0.19.8 megatron-core==0.16.1 'transformers>=5,<6' 'isal>=1.9' 'numpy>=1.26' 'safetensors>=0.4' \
        'shtab>=1.6' 'tqdm>=4.60' 'setuptools>=68' wheel ninja 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' ruff==0.17.5 pyright==1.1.414 \
        'pre-commit>=4' 'matplotlib>=3.8' 'accelerate>=1' 'psutil>=5.9' 'tensorboard>=2.16' \
        'bitsandbytes>=0.50' 'lightning>=2.6' zensical==0.0.73 'peft>=0.18' 'schedulefree>=1.4' 'torch-optimi>=0.3' 2>"$said" || code=$?
    cat "$said" >&2
    return "$code"
}
not_on_the_index() { grep -qF "No matching distribution found for $1" "$said"; }

if ! install "$TORCH"; then
    if [ "$TORCH" = "$PLAIN_TORCH+cpu" ] && not_on_the_index "$TORCH"; then
        echo "setup: PyTorch's CPU build ($TORCH) is not on the package index: taking the plain one, several GB more"
        install "$PLAIN_TORCH" || fail "pip could not install the packages (see above)."
    else
        fail "pip could not install the packages (see above). TORCH_SPEC names another torch requirement."
    fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
