#!/usr/bin/env bash
# Train megatron-core's LLaMA on one mesh, resume on any other, straight from DeepSpeed's own files.
# Needs nothing but Python 3.11 to 3.13 and a C++ compiler: makes .venv by itself. No GPU.
#
#   bash examples/quickstart.sh                  results in runs/quickstart
#   bash examples/quickstart.sh --out DIR        results in DIR
#   bash examples/quickstart.sh --help           all arguments
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
# exec: Ctrl-C and signals reach the program that stops the ranks
exec python "$here/examples/quickstart.py" "$@"
