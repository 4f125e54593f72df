#!/usr/bin/env bash
# Lint, type check and test. Needs nothing but a Python (3.11 to 3.13) and a C++ compiler: makes .venv by itself.
# PYTHON=python3.12 before one of the lines below takes that Python, in an environment of its own (tests/venv.sh).
#
#   bash tests/run.sh             the default tests
#   bash tests/run.sh quick       only those that start no processes
#   bash tests/run.sh all         the slow ones and the GPU ones too, and all cases of tests with many; then `older`
#   bash tests/run.sh older       the core of the tests on ranks, with an older DeepSpeed
#   bash tests/run.sh -k plan -x  further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

OLDER=0.19.4 # of DeepSpeed, what README names
NEWEST=0.19.2 # of megatron-core, as tests/stock says
part=default marks="not slow and not gpu"
case "${1:-}" in
    older) part=older; shift ;;
    quick) part=quick marks+=" and not long and not ranks" LAW_SHARE=0.04; shift ;;
    all) part=all marks="" LAW_SHARE=1; export TESTS_ALL=1 TESTS_COMM="${TESTS_COMM:-gloo}"; shift ;; # tests/mailboxes.py
esac

# What each part takes: wall seconds alone do not tell a slow suite from a busy machine.
mkdir -p "$CACHE"
report=$CACHE/seconds.jsonl log=$(mktemp)
rm -f "$report"
for any_python in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if command -v "$any_python" >/dev/null; then break; fi
done
timed() { "$any_python" tests/processor_time.py "$report" "$@"; }

timed set-up bash tests/setup_env.sh
unset PYTHONDONTWRITEBYTECODE # with it every process that a test starts compiles the package again
export PATH="$PWD/$VENV/bin:$PATH" # DeepSpeed looks for ninja there
export LAW_SHARE="${LAW_SHARE:-0.15}" # of the random cases of each law (tests/core/strategies.py)
export TORCH_EXTENSIONS_DIR="$PWD/$CACHE/torch_extensions" OMP_NUM_THREADS=1
if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }; then export DS_ACCELERATOR=cpu; fi

if [ $part = older ]; then
    bash tests/older_env.sh "$OLDER"
    export PATH="$PWD/$CACHE/older/$OLDER/bin:$PATH" TORCH_EXTENSIONS_DIR="$PWD/$CACHE/older/$OLDER/ops"
    python tests/ops.py
    # parameter_alignment came later; random kills take minutes and say nothing of a version; its own
    # hpZ can't divide a parameter that is smaller than the number of ranks
    exec python -m pytest -m "$marks" -rs --durations=10 \
        --deselect "tests/engines/test_features.py::test_carried_over_bit_for_bit[alignment and round robin]" \
        --deselect tests/engines/test_features.py::test_a_run_with_hpz \
        --deselect tests/engines/test_saves.py::test_killed_at_random_moments_the_newest_whole_tag_loads_bit_for_bit \
        tests/engines/test_pairs.py tests/engines/test_features.py tests/engines/test_saves.py tests/engines/test_older.py \
        tests/test_patches.py::test_zero3_gathers_waited "$@"
fi

# What is no test runs beside the tests. Its output comes when both are done.
set -m # a process group of its own, which can be stopped as a whole
timed checks bash tests/checks.sh $part >"$log" 2>&1 &
checks=$!
set +m
trap 'kill -- -$checks 2>/dev/null || true; rm -f "$log"' EXIT
if [ $part != quick ]; then
    timed ops python tests/ops.py
    # of the newest megatron-core, whose stock programs tests/stock runs: a Python from 3.12 on has it in its environment
    if ! python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then timed newest bash tests/megatron_env.sh "$NEWEST"; fi
fi
code=0
# Ranks mostly wait for each other: two files of tests at a time, each with ranks of its own.
export CACHE TESTS_SECONDS=$CACHE/seconds.json TESTS_RAISED=$PWD/$CACHE/raised.tsv
rm -f "$TESTS_RAISED"
timed tests python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    --ignore tests/test_budget.py --ignore tests/test_claims.py -m "$marks" -rs --durations=10 "$@" || code=$?
wait $checks || code=$?
cat "$log"
if [ $part = all ]; then timed older bash tests/run.sh older || code=$?; fi
"$any_python" tests/processor_time.py "$report"
if [ $part = default ] && [ $# = 0 ] && [ $code = 0 ]; then
    python -m pytest -q -p no:cacheprovider tests/test_budget.py tests/test_claims.py || code=$?
fi
exit $code
