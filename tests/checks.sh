#!/usr/bin/env bash
# What is no test: lint, types, workflows, the wheel, the docs site. tests/run.sh runs it beside the tests.
#
#   bash tests/checks.sh          all of it
#   bash tests/checks.sh quick    types of core and families alone, and no wheel
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh
export PATH="$PWD/$VENV/bin:$PATH"

code=0
check() {
    echo "run: $*"
    "$@" || code=$?
}

# The docs site, from plain Markdown; a link that leads nowhere fails it. A second, no network.
docs_site() {
    local said
    said=$(zensical build --strict 2>&1) || { echo "$said" | grep -v '^ *File "' >&2; return 1; }
}

check ruff format --check --quiet .
check ruff check .
check zizmor --offline --no-progress --quiet .github # what runs this elsewhere
if [ "${1:-}" = quick ]; then
    check pyright --warnings --pythonpath "$VENV/bin/python" megatron_ucp/core megatron_ucp/families
else
    check pyright --warnings --pythonpath "$VENV/bin/python"
    check bash tests/wheel.sh
fi
check docs_site
exit "$code"
