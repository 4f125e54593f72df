#!/usr/bin/env bash
# Make .cache/megatron/VERSION: another megatron-core than that of the environment, beside it. Idempotent.
# With PYTHON it is .cache/pythonVERSION/megatron/VERSION (tests/venv.sh).
#
#   bash tests/megatron_env.sh 0.19.2
#
# Its wheels ask for Python 3.12 from 0.17 on; the code runs on 3.11 with `typing.override`, which tests/stock puts there.
# pip's own settings apply (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

version=$1 folder=$PWD/$CACHE/megatron/$1
if [ -e "$folder/.whole" ]; then exit 0; fi
echo "megatron: installing megatron-core $version into $CACHE/megatron/$version (seconds)"
rm -rf "$folder"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --target "$folder" \
    "megatron-core==$version" six
touch "$folder/.whole"
