"""Gives an environment what its one package requires, of this Python's packages, and nothing else.

    python tests/only_required.py ENVIRONMENT

The environment sees the folder of this Python's packages; an import of what no requirement brings
fails there as where it is not installed.
"""

import re
import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

HOOK = """\
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if path is None and name in {refused!r} else found(name, path, target)
PathFinder.find_spec = find_spec
"""


def plain(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str, found: dict[str, Distribution]) -> None:
    """Adds a distribution, with all that it requires in turn."""
    if plain(name) in found:
        return
    try:
        found[plain(name)] = distribution(name)
    except PackageNotFoundError:  # of another system, or an extra
        return
    for line in found[plain(name)].requires or ():
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            required(one.name, found)


def modules(one: Distribution) -> set[str]:
    """The names at the top that a distribution brings."""
    tops = {Path(file).parts[0] for file in one.files or ()}
    return {top.removesuffix(".py").partition(".")[0] for top in tops if not top.startswith("..")}


def main(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    (own,) = (one for one in Distribution.discover(path=[str(site)]))
    needed: dict[str, Distribution] = {}
    for line in own.requires or ():
        if (one := Requirement(line)).marker is None or one.marker.evaluate({"extra": ""}):
            required(one.name, needed)
    base = Path(sysconfig.get_paths()["purelib"])
    allowed = set[str]().union(*map(modules, needed.values()), modules(own))
    there = set[str]().union(*map(modules, Distribution.discover(path=[str(base)])))
    (site / "sitecustomize.py").write_text(HOOK.format(refused=there - allowed))
    (site / "base.pth").write_text(f"{base}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
