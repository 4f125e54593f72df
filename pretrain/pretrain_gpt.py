r"""Trains megatron-core's GPTModel under DeepSpeed; resumes on any tensor-parallel size, pipeline,
number of ranks and ZeRO stage.

    torchrun --nproc_per_node 4 pretrain/pretrain_gpt.py \
        --model-family llama --tensor-model-parallel-size 2 ...

docs/reference/pretrain.md lists the flags. Exit code 0: done, also after SIGTERM; 2: the input
can't be used; 75: saved, start this rank again (--elastic, another node leaves).
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # run as a script: `pretrain` is not installed


def run() -> int:
    from megatron_ucp.errors import UcpError
    from pretrain.arguments import make_parser
    from pretrain.log import complain

    if {"-h", "--help"} & set(sys.argv[1:]):  # before the imports that take seconds
        make_parser().print_help()
        return 0
    # megatron-core says at import, on every rank, that Transformer Engine and Apex are not there:
    # neither is used
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # DeepSpeed's collectives under names that torch is about to change
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import torch.distributed as dist

    from pretrain.elastic import AGAIN
    from pretrain.training import main

    try:
        return AGAIN if main(sys.argv[1:]).again else 0
    except UcpError as error:
        complain(str(error))
        end_at_once(2)
        return 2
    except RuntimeError:
        traceback.print_exc()
        end_at_once(1)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end_at_once(code: int) -> None:
    """Ends a rank of an elastic run that failed: its agent waits for that, and threads that save,
    or process groups, may wait for a dead rank."""
    if "--elastic" in sys.argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(run())
