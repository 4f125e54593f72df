"""`python -m megatron_ucp.run script.py ...`: the script as it is, with `install` before it."""

import runpy
import sys


def main() -> None:
    """Runs the script that the command line names as `__main__`."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron_ucp.run [-m module | script.py] ...")
    from megatron_ucp.engines.attach import install

    install()
    if sys.argv[1] == "-m" and len(sys.argv) > 2:
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(__import__("pathlib").Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
