"""Two jobs of one rank each that save into one folder at once, under their own tags.

    python -m tests.engines.beside FOLDER --saves 20

Prints a line of JSON: what every job said that is wrong, and what is left in the folder.
"""

import argparse
import json
import os
from pathlib import Path

from tests.engines.killed import prepare, start

KEPT = 2


def save_beside(name: str, folder: Path, saves: int) -> None:
    """Saves after every step; each tag must be whole when its save has returned, and stay."""
    import megatron_ucp as ucp
    from megatron_ucp.reshard.look import check_whole
    from tests.engines.model import Setup, make_engine, train

    engine = ucp.attach(make_engine(Setup(1, "fp32"), attach=False), keep_latest=KEPT)
    wrong: list[str] = []
    for step in range(saves):
        train(engine, 1, first=step)
        try:
            engine.save_checkpoint(folder, tag=f"{name}{step}")
            for kept in range(max(0, step + 1 - KEPT), step + 1):
                check_whole(folder / f"{name}{kept}")
        except ucp.UcpError as error:
            wrong.append(f"{name}{step}: {error}")
    (folder / f"{name}.json").write_text(json.dumps(wrong))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=20)
    args = parser.parse_args()
    prepare()
    stores = {name: args.folder.with_name(f"{name}.store") for name in "ab"}
    jobs = [
        start(0, 1, store, save_beside, name, args.folder, args.saves)
        for name, store in stores.items()
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in jobs]
    said = [json.loads((args.folder / f"{name}.json").read_text()) for name in "ab"]
    wrong = [line for lines in said for line in lines]
    left = sorted(path.name for path in args.folder.iterdir() if path.suffix != ".json")
    print(json.dumps({"codes": codes, "wrong": wrong, "left": left}))


if __name__ == "__main__":
    main()
