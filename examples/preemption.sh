#!/usr/bin/env bash
# Kill a training job ten times at random moments, on changing meshes, and compare it with one that nobody killed.
# Needs nothing but Python 3.11 to 3.13 and a C++ compiler: makes .venv by itself. No GPU.
#
#   bash examples/preemption.sh                  results in runs/preemption
#   bash examples/preemption.sh --help           all arguments
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
exec python "$here/examples/preemption.py" "$@"
