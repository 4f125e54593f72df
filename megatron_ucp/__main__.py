"""`python -m megatron_ucp` is `megatron-ucp`."""

import sys

from megatron_ucp.cli import main

sys.exit(main())
