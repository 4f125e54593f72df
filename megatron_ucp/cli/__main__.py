"""`python -m megatron_ucp.cli` is `megatron-ucp`."""

import sys

from megatron_ucp.cli import main

sys.exit(main())
