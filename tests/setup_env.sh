#!/usr/bin/env bash
# Make .venv in the checkout, with all that tests and examples need. Idempotent: returns at once when it is up to date.
#
#   bash tests/setup_env.sh
#
# PYTHON        the Python to use, 3.11 to 3.13. Found by itself otherwise. Where it is named, the environment is not .venv
#               but .cache/pythonVERSION/venv (tests/venv.sh)
# TORCH_SPEC    another torch requirement, for a machine where the one below can't be had
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

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

if [ -x "$VENV/bin/python" ]; then python=$VENV/bin/python; else python=$(find_python); fi

# The newest tested versions that this Python can have, as in setup.py: megatron-core wants Python 3.12 from 0.17 on.
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    TORCH='torch==2.14.1' MEGATRON='megatron-core==0.19.2'
else
    TORCH='torch==2.13.0' MEGATRON='megatron-core==0.16.1'
fi

stamp=$VENV/.megatron_ucp_stamp
wanted=$(cat setup.py pyproject.toml tests/setup_env.sh <(printf '%s' "${TORCH_SPEC:-$TORCH}") | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    TORCH_EXTENSIONS_DIR=$CACHE/torch_extensions "$VENV/bin/python" tests/ops.py locks # a build that was killed left one, and every later job waits for it
    exit 0
fi

if [ ! -x "$VENV/bin/python" ]; then
    echo "setup: making $VENV with $python"
    "$python" -m venv "$VENV" || fail "could not make $VENV (on Debian: apt install python3-venv, or python3.11-venv for 3.11)"
fi
pip_install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# On Linux x86_64 the plain version is a CUDA build of several GB. The CPU build is a version of its own, and not on every
# index: pip is asked for it alone first, because it words its failure in many ways when it resolves everything at once.
if [ -n "${TORCH_SPEC:-}" ]; then
    TORCH=$TORCH_SPEC
elif ! has_gpu && [ "$(uname -sm)" = "Linux x86_64" ]; then
    if pip_install --dry-run --no-deps "$TORCH+cpu" >/dev/null 2>&1; then
        TORCH=$TORCH+cpu
    else
        echo "setup: pip does not find PyTorch's CPU build ($TORCH+cpu): taking the plain one, several GB more"
    fi
fi
echo "setup: installing $TORCH, DeepSpeed, Megatron-Core, Transformers and the development tools (minutes, the first time)"
# in one call: a second one could replace torch by what another package prefers
pip_install "$TORCH" deepspeed==0.19.8 "$MEGATRON" 'transformers>=5,<6' 'isal>=1.9' 'numpy>=1.26' 'safetensors>=0.4' \
    'shtab>=1.6' 'tqdm>=4.60' 'setuptools>=68' wheel ninja 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' ruff==0.17.5 pyright==1.1.414 \
    'pre-commit>=4' 'matplotlib>=3.8' 'accelerate>=1' 'psutil>=5.9' 'tensorboard>=2.16' \
    'bitsandbytes>=0.50' 'lightning>=2.6' zensical==0.0.73 'peft>=0.18' 'schedulefree>=1.4' 'lion-pytorch>=0.2' 'torch-optimi>=0.3' \
    'obstore>=0.12' 'moto[server]>=5.2' 'zizmor>=1.20' ||
    fail "pip could not install the packages (see above). TORCH_SPEC names another torch requirement."
pip_install --no-deps --no-build-isolation -e .
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
