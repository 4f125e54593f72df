"""Times DeepSpeed's own conversion to its universal format, imports apart; prints the seconds as
the last line."""

import sys
import time
from argparse import Namespace


def main(source: str, output: str, workers: int, stage: int) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=source,
        output_folder=output,
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=stage < 3,
    )
    started = time.perf_counter()
    ds_to_universal.main(options)
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
