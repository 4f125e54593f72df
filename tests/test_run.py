"""The runner gives Megatron-LM's training program, unchanged, this package's load and save; neither
engine has to be there for the other. Stand-ins of `megatron.training` have the import lines of each
version: in 0.18 they became one statement."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.scripts import run_command

ONE_BY_ONE = """\
from megatron.training.checkpointing import load_checkpoint
from megatron.training.checkpointing import save_checkpoint, save_grads
from megatron.training.checkpointing import checkpoint_exists
from megatron.training.checkpointing import get_loaded_iteration
"""
TOGETHER = """\
from megatron.training.checkpointing import (
    checkpoint_exists,
    get_loaded_iteration,
    load_checkpoint,
    save_checkpoint,
    save_grads,
)
"""
IMPORTS = {"until 0.17": ONE_BY_ONE, "from 0.18": TOGETHER}
# the program calls both by the names that its module has
PROGRAM = """

def pretrain():
    for call in (load_checkpoint, save_checkpoint):
        print(call.__name__, "of", call.__module__)
    try:
        load_checkpoint([], None, None)
    except Exception as error:
        print(type(error).__name__)
"""
CHECKPOINTING = """\
def load_checkpoint(model, optimizer, opt_param_scheduler): print("stock")
def save_checkpoint(*_): pass
save_grads = checkpoint_exists = get_loaded_iteration = None
"""
TRAINING = """\
import types
def get_args(): return types.SimpleNamespace(save=None)
from .training import pretrain
"""
# what `pip install` did not bring: the import of a name raises as it does without the package
WITHOUT = """\
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
OURS = [f"{name}_checkpoint of megatron_ucp.engines.megatron.program" for name in ("load", "save")]
SAID = "Megatron-LM's load_checkpoint and save_checkpoint are this package's"


def stand_in(folder: Path, training: str) -> Path:
    """A folder with a program and the part of Megatron-LM that it needs."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TRAINING)
    (package / "checkpointing.py").write_text(CHECKPOINTING)
    (package / "training.py").write_text(training)
    program = folder / "pretrain_gpt.py"
    program.write_text(
        "from megatron.training import pretrain\nif __name__ == '__main__': pretrain()"
    )
    return program


def run(folder: Path, *words: str, without: tuple[str, ...] = (), **env: str) -> tuple[str, str]:
    """What a process with these words behind `python -m` prints, and what it says."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(WITHOUT.format(names=without) if without else "")
    done = run_command(
        [sys.executable, "-m", *words], env={"PYTHONPATH": f"{site}:{ROOT}", **env}, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.ranks
@pytest.mark.cases()
@pytest.mark.parametrize("version", IMPORTS)
def test_a_program_of_megatron_lm_runs_unchanged(tmp_path: Path, version: str) -> None:
    program = stand_in(tmp_path, IMPORTS[version] + PROGRAM)
    out, said = run(tmp_path, "megatron_ucp.run", str(program), without=("deepspeed",))
    assert out.splitlines() == [*OURS, "UsageError"], "stock's own would print `stock`"
    assert said.count(SAID) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["module", "command", "already imported", "other ranks", "stock"])
def test_every_way_to_start_it(tmp_path: Path, way: str) -> None:
    program = str(stand_in(tmp_path, TOGETHER + PROGRAM))
    words = {
        "module": ["megatron_ucp.run", "-m", "pretrain_gpt"],
        "command": ["megatron_ucp", "run", program],
        "already imported": ["pretrain_gpt"],
        "other ranks": ["megatron_ucp.run", program],
        "stock": ["pretrain_gpt"],
    }[way]
    if way == "already imported":
        Path(program).write_text(
            "import megatron.training as stock\nfrom megatron_ucp.run import run\n"
            "open('inner.py', 'w').write('import megatron.training as t; t.pretrain()')\n"
            "run(['inner'], is_module=True)"
        )
    env = {"RANK": "1"} if way == "other ranks" else {}
    out, said = run(tmp_path, *words, without=("deepspeed",), **env)
    if way == "stock":
        assert OURS[0] not in out and "stock" in out
    else:
        assert out.splitlines() == [*OURS, "UsageError"]
        assert said.count(SAID) == (way != "other ranks")


@pytest.mark.ranks
def test_a_machine_without_megatron_runs_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import deepspeed\nprint(hasattr(deepspeed.initialize, '__wrapped__'))"
    )
    out, said = run(tmp_path, "megatron_ucp.run", "train.py", without=("megatron",))
    assert out.splitlines()[-1] == "True" and SAID not in said


@pytest.mark.ranks
def test_a_program_that_imports_neither_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    out, said = run(tmp_path, "megatron_ucp.run", "train.py", without=("megatron", "deepspeed"))
    assert out == "trained\n" and "neither DeepSpeed nor Megatron-LM" in said


@pytest.mark.ranks
def test_a_program_that_has_no_such_names_is_refused(tmp_path: Path) -> None:
    """A later Megatron-LM may call them otherwise: stock's save must not run in silence."""
    program = stand_in(tmp_path, "def pretrain(): print('stock')")
    program.write_text(
        "try:\n    import megatron.training\nexcept Exception as error:\n    print(error)"
    )
    out, said = run(tmp_path, "megatron_ucp.run", str(program), without=("deepspeed",))
    assert "megatron.training.training has no load_checkpoint, save_checkpoint" in out
    assert SAID not in said


def patches() -> list[list[str]]:
    """The patches of the page, as lines."""
    page = (ROOT / "docs" / "megatron.md").read_text()
    return [one.splitlines() for one in re.findall(r"```diff\n(.*?)```", page, re.S)]


def applied(patch: list[str], text: str) -> str | None:
    """The text with the lines that a patch adds, None where its other lines are not there once."""
    before = "".join(f"{line[1:]}\n" for line in patch if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in patch)
    return text.replace(before, after) if text.count(before) == 1 else None


@pytest.mark.ranks
@pytest.mark.cases()
@pytest.mark.parametrize("version", IMPORTS)
def test_a_patch_of_the_page_fits_each_version(tmp_path: Path, version: str) -> None:
    (patched,) = filter(None, (applied(patch, IMPORTS[version]) for patch in patches()))
    program = stand_in(tmp_path, patched + PROGRAM)
    out, _ = run(tmp_path, program.stem, without=("deepspeed",))
    assert out.splitlines() == [*OURS, "UsageError"]


@pytest.mark.ranks
@pytest.mark.parametrize("version", IMPORTS)
def test_the_one_line_of_the_page_fits_every_version(tmp_path: Path, version: str) -> None:
    """Behind all else of the file: what it defines looks the names up when it is called."""
    program = stand_in(tmp_path, IMPORTS[version] + PROGRAM)
    page = (ROOT / "docs" / "megatron.md").read_text()
    (command,) = re.findall(r"^echo .*training\.py$", page, re.M)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=20)
    out, _ = run(tmp_path, program.stem, without=("deepspeed",))
    assert out.splitlines() == [*OURS, "UsageError"]
