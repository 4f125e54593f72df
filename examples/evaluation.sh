#!/usr/bin/env bash
# The published evaluation of Universal Checkpointing: one source to ten targets, seven sources to one target. Ten minutes.
# Needs nothing but Python 3.11 to 3.13 and a C++ compiler: makes .venv by itself. No GPU.
#
#   bash examples/evaluation.sh                  results in runs/evaluation
#   bash examples/evaluation.sh --help           all arguments
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
exec python "$here/examples/evaluation.py" "$@"
