#!/usr/bin/env bash
# An elastic run: four ranks, one is killed, three go on, a fourth joins. Two minutes.
# Needs nothing but Python 3.11 to 3.13 and a C++ compiler: makes .venv by itself. No GPU.
#
#   bash examples/elastic.sh                  results in runs/elastic
#   bash examples/elastic.sh --help           all arguments
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
exec python "$here/examples/elastic.py" "$@"
