#!/usr/bin/env bash
# Lint, type check and test. Needs nothing but a Python (3.11 to 3.13) and a C++ compiler: makes .venv by itself.
# PYTHON=python3.12 before one of the lines below takes that Python, in an environment of its own (tests/venv.sh).
#
#   bash tests/run.sh             the default tests
#   bash tests/run.sh quick       only those that start no processes (a minute and a half on two idle cores)
#   bash tests/run.sh all         the slow ones and the GPU ones too, and all cases of tests with many; then `older`
#   bash tests/run.sh older       the core of the tests on ranks, with an older DeepSpeed
#   bash tests/run.sh -k plan -x  further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

OLDER=0.19.4 # of DeepSpeed, what README names
NEWEST=0.19.2 # of megatron-core, as tests/stock says
quick= all= older=
case "${1:-}" in
    older) older=1 marks="not slow and not gpu"; shift ;;
    quick) quick=1 marks="not slow and not gpu and not long"; LAW_SHARE=0.04; shift ;;
    all) all=1 marks=""; LAW_SHARE=1; export TESTS_COMM="${TESTS_COMM:-gloo}"; shift ;; # tests/mailboxes.py
    *) marks="not slow and not gpu" ;;
esac

# Wall and processor seconds of what ended since the last call, whose name this is: of all descendants, and as a share of
# the cores. Wall seconds alone do not tell a slow suite from a busy machine.
timing=$(mktemp) report="" last_wall=$EPOCHREALTIME last_cpu=0
spent() {
    local cpu line
    times >"$timing" # not in $(...): a shell of its own has no children
    cpu=$(awk 'NR == 2 { split($1 "m" $2, t, "[ms]+"); print t[1] * 60 + t[2] + t[3] * 60 + t[4] }' "$timing")
    line=$(awk -v name="$1" -v from="$last_wall" -v to="$EPOCHREALTIME" -v cpu="$cpu" -v before="$last_cpu" -v cores="$(nproc --all)" \
        'BEGIN { wall = to - from; used = cpu - before
                 printf "run: %-8s %6.0f s, processor %6.0f s, %3.0f %% of %d cores", name, wall, used, 100 * used / (wall * cores), cores }')
    report+="$line"$'\n' last_wall=$EPOCHREALTIME last_cpu=$cpu
}

bash tests/setup_env.sh
spent set-up
unset PYTHONDONTWRITEBYTECODE # with it every process that a test starts compiles the package again
export PATH="$PWD/$VENV/bin:$PATH" # DeepSpeed looks for ninja there
export LAW_SHARE="${LAW_SHARE:-0.15}" # of the random cases of each law (tests/core/strategies.py)
export TORCH_EXTENSIONS_DIR="$PWD/$CACHE/torch_extensions" OMP_NUM_THREADS=1
if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }; then export DS_ACCELERATOR=cpu; fi

build_ops() { # Before the tests, whose ranks have little time each and would all build them at once.
    # The first one is what every init_distributed on a CPU wants.
    local op
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    # a build that was killed leaves its lock, and whoever needs the op waits for that lock for ever
    find "$TORCH_EXTENSIONS_DIR" -name lock -delete
    for op in deepspeed_shm_comm fused_adam cpu_adam; do
        if [ -z "$(find "$TORCH_EXTENSIONS_DIR" -name "$op.so" -print -quit)" ]; then
            echo "run: building DeepSpeed's ops, once (minutes)"
            break
        fi
    done
    python -c '
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op

build_shm_op()
on_cpu = get_accelerator().device_name() == "cpu"  # elsewhere DeepSpeed asks for another compiler
for builder in ("FusedAdamBuilder", "CPUAdamBuilder") if on_cpu else ():
    get_accelerator().create_op_builder(builder).load()
' >"$CACHE/build_ops.log" 2>&1 ||
        { cat "$CACHE/build_ops.log" >&2; echo "run: the ops could not be built; is there a C++ compiler (g++)?" >&2; exit 1; }
}

if [ -n "$older" ]; then
    bash tests/older_env.sh "$OLDER"
    export PATH="$PWD/$CACHE/older/$OLDER/bin:$PATH" TORCH_EXTENSIONS_DIR="$PWD/$CACHE/older/$OLDER/ops"
    build_ops
    # parameter_alignment came later; random kills take minutes and say nothing of a version; its own
    # hpZ can't divide a parameter that is smaller than the number of ranks
    exec python -m pytest -m "$marks" -rs --durations=10 \
        --deselect "tests/engines/test_features.py::test_carried_over_bit_for_bit[alignment and round robin]" \
        --deselect tests/engines/test_features.py::test_a_run_with_hpz \
        --deselect tests/engines/test_saves.py::test_killed_at_random_moments_the_newest_whole_tag_loads_bit_for_bit \
        tests/engines/test_pairs.py tests/engines/test_features.py tests/engines/test_saves.py tests/engines/test_older.py \
        tests/test_patches.py::test_zero3_gathers_waited "$@"
fi

code=0
check() {
    echo "run: $*"
    "$@" || code=$?
}

check ruff format --check --quiet .
check ruff check .

# The docs site, from plain Markdown; a link that leads nowhere fails it. A second, no network.
docs_site() {
    local said
    said=$(zensical build --strict 2>&1) || { echo "$said" | grep -v '^ *File "' >&2; return 1; }
}

# What is no test runs beside the tests. Its output comes when both are done.
beside() {
    if [ -n "$quick" ]; then # all types take a minute alone: the default run checks them
        check pyright --warnings --pythonpath "$VENV/bin/python" megatron_ucp/core megatron_ucp/families
    else
        check pyright --warnings --pythonpath "$VENV/bin/python"
        check bash tests/wheel.sh
    fi
    check docs_site
    exit "$code"
}
log=$(mktemp)
set -m # a process group of its own, which can be stopped as a whole
beside >"$log" 2>&1 &
set +m
trap 'kill -- -$! 2>/dev/null || true; rm -f "$log" "$timing"' EXIT
if [ -z "$quick" ]; then
    build_ops
    # of the newest megatron-core, whose stock programs tests/stock runs: a Python from 3.12 on has it in its environment
    if ! python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then bash tests/megatron_env.sh "$NEWEST"; fi
fi
spent ops
# Ranks mostly wait for each other: two files of tests at a time, each with ranks of its own.
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    -m "$marks${quick:+ and not ranks}" -rs --durations=10 "$@"
spent tests
tested=$code code=0
wait $! || code=$?
cat "$log"
spent beside # pyright, the wheel, the site: most of it while the tests ran
if [ "$tested" != 0 ]; then code=$tested; fi
if [ -n "$all" ]; then check bash tests/run.sh older; spent older; fi
printf '%s' "$report"
exit "$code"
