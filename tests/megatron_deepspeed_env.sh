#!/usr/bin/env bash
# Make .cache/megatron_deepspeed: the sources of Megatron-DeepSpeed's program, with what it needs beside the environment. Idempotent.
#
#   bash tests/megatron_deepspeed_env.sh SOURCES [NAME]
#
# NAME is another folder than megatron_deepspeed in .cache. SOURCES is a folder with `megatron` and `pretrain_gpt.py` in it (commit 4efb479d was tested), or a .tar.gz of that. Its data
# helper is compiled. With PYTHON it is .cache/pythonVERSION/megatron_deepspeed (tests/venv.sh). pip's own settings apply.
set -euo pipefail
sources=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

folder=$PWD/$CACHE/${2:-megatron_deepspeed}
if [ "$(cat "$folder/.whole" 2>/dev/null)" = "$sources" ]; then exit 0; fi
echo "megatron_deepspeed: copying $sources, compiling its helper (seconds)"
rm -rf "$folder"
mkdir -p "$folder"
if [ -d "$sources" ]; then cp -r "$sources/megatron" "$sources/pretrain_gpt.py" "$sources/tools" "$folder"; else tar xzf "$sources" -C "$folder"; fi
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --target "$folder/site" pybind11 six einops nltk regex
python=$PWD/$VENV/bin/python
cd "$folder/megatron/data"
includes=$(PYTHONPATH=$folder/site "$python" -m pybind11 --includes)
ending=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
# shellcheck disable=SC2086  (several words)
g++ -O3 -shared -std=c++11 -fPIC $includes helpers.cpp -o "helpers$ending"
echo "$sources" >"$folder/.whole"
