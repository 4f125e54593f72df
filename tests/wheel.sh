#!/usr/bin/env bash
# Builds the wheel, installs it with what it requires and nothing else, and uses the tool there: no DeepSpeed, no Megatron-Core.
#
#   bash tests/wheel.sh
#
# What it requires is read from the environment of the tests (tests/only_required.py): nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip() { "$1" -m pip --quiet --disable-pip-version-check "${@:2}"; }

# From a copy: a folder `build` of another day would get into the wheel, and this one into the checkout.
mkdir "$folder/source"
mkdir "$folder/source/docs"
cp -r megatron_ucp patches setup.py pyproject.toml README.md LICENSE "$folder/source"
cp docs/troubleshooting.md "$folder/source/docs" # which `megatron-ucp help` prints
pip "$VENV/bin/python" wheel --no-deps --wheel-dir "$folder" "$folder/source"
"$VENV/bin/python" -m venv --without-pip "$folder/clean"
python="$folder/clean/bin/python" tool="$folder/clean/bin/megatron-ucp"
pip "$VENV/bin/python" --python "$python" install --no-deps "$folder"/*.whl
"$VENV/bin/python" tests/only_required.py "$folder/clean" # what else is there can't be imported
cd "$folder" # not the checkout: what is imported is what was installed

"$python" - <<'END'
import importlib.util
from collections import OrderedDict
from pathlib import Path

import torch

import megatron_ucp

found = [name for name in ("deepspeed", "megatron", "transformers") if importlib.util.find_spec(name)]
assert not found, f"{found} are here, and must not be"
assert "site-packages" in megatron_ucp.__file__, megatron_ucp.__file__
for name, last in (("one", 4.0), ("same", 4.0), ("other", 5.0)):
    Path(name).mkdir()
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, last]))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save({"module": OrderedDict(weight=weight.detach()), "buffer_names": [], "dp_world_size": 1, "mp_world_size": 1,
                "global_steps": 1, "skipped_steps": 0, "optimizer": optimizer.state_dict()}, f"{name}/mp_rank_00_model_states.pt")
# as BF16_Optimizer of DeepSpeed on one rank
Path("flat").mkdir()
torch.save({"module": OrderedDict(weight=weight.detach().bfloat16()), "buffer_names": [], "optimizer": None, "global_steps": 1,
            "param_shapes": [OrderedDict(weight=weight.shape)], "dp_world_size": 1, "mp_world_size": 1, "skipped_steps": 0,
            "ds_config": {"bf16": {"enabled": True}}}, "flat/mp_rank_00_model_states.pt")
torch.save({"optimizer_state_dict": {"single_partition_of_fp32_groups": [weight.detach().bfloat16().float()], "clip_grad": 1.0,
                                     "base_optimizer_state": optimizer.state_dict(), "partition_count": [1]}},
           "flat/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
END

expect() { # exit code, then a verb with its arguments
    local code=0
    echo "wheel: megatron-ucp ${*:2}"
    "$tool" "${@:2}" >out 2>&1 || code=$?
    if [ "$code" != "$1" ]; then cat out >&2; echo "wheel: exit code $code, expected $1" >&2; exit 1; fi
}
# One line for each verb that works without the engines.
expect 0 inspect one
expect 0 verify one
expect 0 verify --deep one
expect 0 diff one same
expect 1 diff one other
expect 2 inspect nowhere
expect 0 convert flat universal --to universal
expect 0 convert universal native --mesh dp=2,zero=3
expect 0 diff flat native
expect 2 convert one other_output --to universal
expect 0 plan flat --mesh dp=2,zero=3
expect 2 plan flat --mesh dp=2,zero=3 --rules megatron_deepspeed_split # it is there, and for another model
printf 'damage' | dd of=one/mp_rank_00_model_states.pt bs=1 seek=1000 conv=notrunc status=none
expect 1 verify --deep one
echo "wheel: $(basename ./*.whl) works without deepspeed and megatron-core"
