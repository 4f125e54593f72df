"""What the golden folders of Megatron-DeepSpeed's program hold: `python -m
tests.formats.golden.make_megatron_deepspeed SOURCES`, where that folder has the program's sources
(tests/megatron_deepspeed_env.sh).

The program of commit 4efb479d, unpatched, wrote the folders under DeepSpeed 0.19.8 and torch
2.13.0, over gloo: 2 layers, 4 heads, sequences of 16 tokens, 3 steps; `next_losses.txt` has the
losses of the next three. Here it loads each one on the mesh that wrote it, and its own ranks say
what they have.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy

from tests.formats.golden.megatron_deepspeed_folders import FOLDER, FOLDERS, OF_ALL
from tests.stock.megatron_deepspeed import Job
from tests.stock.server import Server


def main(sources: str) -> None:
    server = Server("tests.stock.megatron_deepspeed", sources)
    with tempfile.TemporaryDirectory() as place:
        for name, made in FOLDERS.items():
            copy = Path(place, name)
            shutil.copytree(FOLDER / name, copy)
            flags = f"{made.flags} {made.model} {OF_ALL} --load {copy}"
            more = {"world": made.mesh.world, "zero": made.mesh.zero, "dtype": made.dtype}
            job = Job(
                f"{place}/{name}.pt",
                place,
                flags,
                program="stock",
                look=True,
                text="golden",
                **more,
            )
            loaded = server.run(job)["loaded"]
            arrays = {"|".join(key): value.numpy() for key, value in loaded["full"].items()}
            with (FOLDER / f"{name}.npz").open("wb") as file:
                numpy.savez_compressed(file, **arrays)
            print(name, len(arrays), next(iter(loaded["scalars"].values())))
    server.close()


if __name__ == "__main__":
    main(sys.argv[1])
