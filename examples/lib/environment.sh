# Sourced by the examples: makes .venv, and DeepSpeed's communication op, once. Four ranks on CPUs and gloo, also where there is a GPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

source "$here/tests/venv.sh"
bash "$here/tests/setup_env.sh"
export PATH="$here/$VENV/bin:$PATH" # DeepSpeed looks for ninja there
export TORCH_EXTENSIONS_DIR="$here/$CACHE/torch_extensions" OMP_NUM_THREADS=1
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" # four ranks on CPU and gloo, on a machine with a GPU too

mkdir -p "$TORCH_EXTENSIONS_DIR"
# A start that was killed leaves its lock, and whoever needs the op waits for that lock for ever.
find "$TORCH_EXTENSIONS_DIR" -name lock -delete
if [ -z "$(find "$TORCH_EXTENSIONS_DIR" -name 'deepspeed_shm_comm.so' -print -quit)" ]; then
    echo "examples: building DeepSpeed's communication op, once (about a minute)"
    # Built here: the ranks would all build it at the same time.
    python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >"$here/$CACHE/build_comm_op.log" 2>&1 ||
        { cat "$here/$CACHE/build_comm_op.log" >&2
          echo "examples: the op could not be built; is there a C++ compiler (g++)?" >&2
          exit 1; }
fi
