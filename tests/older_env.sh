#!/usr/bin/env bash
# Make .cache/older/VERSION: the packages of .venv with an older DeepSpeed in front of its own. Idempotent.
# With PYTHON it is .cache/pythonVERSION/older/VERSION (tests/venv.sh).
#
#   bash tests/older_env.sh 0.19.0
#
# pip's own settings apply (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

version=$1 folder=$PWD/$CACHE/older/$1
shared=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ -e "$folder/.whole" ]; then exit 0; fi
echo "older: installing DeepSpeed $version into $CACHE/older/$version (half a minute)"
rm -rf "$folder"
"$VENV/bin/python" -m venv --without-pip "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$shared" >"$own/shared.pth"
ln -s "$PWD/patches" "$own/megatron_ucp_patches" # an editable installation is not seen through a path
# Its set-up script imports torch, so it is built beside the packages that are there.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --ignore-installed --no-deps --no-build-isolation --prefix "$folder" "deepspeed==$version"
found=$(cd / && DS_ACCELERATOR=cpu "$folder/bin/python" -c 'import deepspeed; print(deepspeed.__version__)' | tail -n 1)
if [ "$found" != "$version" ]; then echo "older: DeepSpeed $found was imported" >&2; exit 2; fi
touch "$folder/.whole"
