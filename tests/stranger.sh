#!/usr/bin/env bash
# What somebody does who has a ZeRO-3 run and never heard of us: install, resume it on another number of ranks with the script
# as it is, export, load, verify, compare. Stops at the first step that fails.
#
#   bash tests/stranger.sh PYTHON FOLDER     PYTHON is that of a virtual environment with torch, DeepSpeed and transformers
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$1" folder="$2"
export OMP_NUM_THREADS=1 PATH="$(dirname "$python"):$PATH"
unset PYTHONPATH
cd "$folder"
cp "$checkout/examples/stock_train.py" train.py # away from the checkout: what is imported is what pip installed

say() { printf '\n== %s\n' "$*"; }
ranks() { "$python" -m torch.distributed.run --standalone --nproc_per_node "$@"; }
versions() { "$python" -m pip list 2>/dev/null | grep -iE '^(torch|deepspeed|megatron-core|transformers) '; }

say "2 ranks, ZeRO-3, plain DeepSpeed"
# torch sometimes aborts a process of plain DeepSpeed that is done ("terminate called without an active exception")
ranks 2 train.py --steps 3 2>&1 | tee stock.log ||
    { grep -q "terminate called without an active exception" stock.log && [ -f runs/stock/latest ] && [ -f runs/stock/config.json ]; }
if ranks 1 train.py --steps 4 --resume >refused.log 2>&1; then
    echo "plain DeepSpeed resumed on 1 rank: nothing is shown here" >&2
    exit 1
fi
grep -o "The checkpoint being loaded used a DP world size of [0-9]*" refused.log | head -1

say "install"
before="$(versions)"
"$python" -m pip install --quiet --disable-pip-version-check ${STRANGER_PIP:-} "$checkout"
[ "$before" = "$(versions)" ] # the installation has left them alone
"$python" -c 'import megatron_ucp, sys; print(megatron_ucp.__file__); sys.exit("site-packages" not in megatron_ucp.__file__)'

say "resume on 1 rank, the script unchanged"
cp -r runs/stock runs/on1
ranks 1 -m megatron_ucp.run train.py --steps 5 --resume --out runs/on1 2>&1 | tee on1.log
grep "megatron_ucp: loaded step 3 .*dp=2,zero=3 -> .*dp=1,zero=3; .*checksums of" on1.log
grep "megatron_ucp: saved step 5 " on1.log
[ "$(grep -c '^step [45]: loss' on1.log)" = 2 ]

say "weights for transformers"
megatron-ucp export-hf runs/on1 hf --verify
"$python" -c 'from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.from_pretrained("hf").num_parameters())'

say "whole, and the same"
megatron-ucp ls runs/on1
megatron-ucp verify runs/on1 --deep
megatron-ucp diff runs/stock runs/on1 --limit 2 && exit 1 # two steps later
megatron-ucp convert runs/stock copy/checkpoint-3 --mesh dp=3
megatron-ucp diff runs/stock copy/checkpoint-3
say "done"
