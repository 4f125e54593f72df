"""What a module may import, and the rules of style that a parser can check. See
docs/maintain/architecture.md."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_ucp"
ENGINE_LIBRARIES = {"deepspeed", "megatron"}
TENSORS = {"numpy", "safetensors", "torch"}


@dataclass(frozen=True)
class Layer:
    """Which other layers a layer may import, and which libraries beside Python's own (None: all but
    the engines')."""

    layers: frozenset[str]
    libraries: frozenset[str] | None = None


BELOW_ENGINES = frozenset({"errors", "say", "core", "families", "formats", "reshard"})
LAYERS = {
    "errors": Layer(frozenset(), frozenset()),
    "say": Layer(frozenset(), frozenset({"tqdm"})),
    "core": Layer(frozenset({"errors"}), frozenset()),
    "families": Layer(frozenset({"errors", "core"}), frozenset()),
    "formats": Layer(frozenset({"errors", "core"}), frozenset({*TENSORS, "isal"})),
    "reshard": Layer(frozenset({"errors", "say", "core", "families", "formats"})),
    "engines": Layer(BELOW_ENGINES | {"patches"}),
    # of the top the version, and the runner of scripts, which is not imported for anything else
    "cli": Layer(BELOW_ENGINES | {"top"}),
    "patches": Layer(frozenset({"errors"})),
    "top": Layer(
        BELOW_ENGINES | {"engines", "cli", "top"}
    ),  # the public names, and what is started with python -m
    "programs": Layer(BELOW_ENGINES | {"engines", "cli", "top", "patches", "programs"}),
}
PROGRAMS = {"pretrain", "examples", "benchmarks"}
# Only these may spell a mesh axis; everybody else asks the mesh and the manifest. The last two know
# what DeepSpeed's files and patterns are called.
AXES = {"tp", "pp", "vpp", "ep", "etp", "edp", "cp", "sp", "dp"}
SPELL_AXES = (
    "megatron_ucp/families/",
    "megatron_ucp/core/mesh.py",
    "megatron_ucp/formats/deepspeed/files.py",
    "megatron_ucp/formats/deepspeed/tp_patterns.py",
)


def layer_of(parts: tuple[str, ...]) -> str | None:
    """The layer of a dotted name; None for a library."""
    if parts[0] in PROGRAMS:
        return "programs"
    if parts[0] in ("megatron_ucp_patches", "patches"):
        return "patches"
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "top"


def imports(
    tree: ast.Module, package: tuple[str, ...]
) -> Iterator[tuple[int, tuple[str, ...], bool]]:
    """Every import as (line, dotted name, whether it runs on import of the module). `package`: for
    relative ones."""
    late = {id(node) for node in late_nodes(tree)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, [base, node.module or ""]))
            names = [f"{origin}.{alias.name}" for alias in node.names]  # the name may be a module
        elif (
            isinstance(node, ast.Call)
            and called(node) in ("import_module", "__import__")
            and node.args
        ):
            literal = node.args[0]
            names = (
                [literal.value]
                if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
                else []
            )
        for name in names:
            yield node.lineno, tuple(name.split(".")), id(node) not in late  # type: ignore[attr-defined]


def late_nodes(tree: ast.AST, late: bool = False) -> Iterator[ast.AST]:
    """What does not run on import."""
    for node in ast.iter_child_nodes(tree):
        inner = late or is_late(node)
        if inner:
            yield node
        yield from late_nodes(node, inner)


def is_late(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def import_faults(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    parts = path.with_suffix("").parts
    package, layer = parts[:-1], layer_of(parts) or ""
    rules = LAYERS[layer]
    for line, name, at_import in imports(tree, package):
        target = layer_of(name)
        if target is not None:
            if target != layer and target not in rules.layers:
                yield line, f"{layer} imports {target} ({'.'.join(name)})"
            own, other = engine_of(parts), engine_of(name)
            if layer == "engines" and other not in ("", own) and path != CHOOSES_ENGINE:
                yield line, f"{own or 'what is of all engines'} imports the engine {other}"
        elif name[0] in ENGINE_LIBRARIES:
            if layer not in ("engines", "patches", "programs"):
                yield line, f"{layer} imports {name[0]}; only engines may"
            elif layer == "engines" and at_import:
                yield line, f"engines imports {name[0]} outside a function"
        elif name[0] == "obstore" and path == STORE:
            if at_import:
                yield line, "obstore, which need not be there, is imported outside a function"
        elif (
            rules.libraries is not None and name[0] not in rules.libraries | sys.stdlib_module_names
        ):
            yield line, f"{layer} imports {name[0]}"


CHOOSES_ENGINE = Path(PACKAGE, "engines", "record.py")  # which one an engine is of


def engine_of(parts: tuple[str, ...]) -> str:
    """Of which engine's folder a dotted name is; empty for what is of all engines."""
    is_inside = parts[:2] == (PACKAGE, "engines") and len(parts) > 2
    return parts[2] if is_inside and parts[2] in ENGINE_LIBRARIES else ""


def axis_faults(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Names of mesh axes as literals, where nobody but the mesh should know them."""
    if str(path).startswith(SPELL_AXES):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in AXES:
            yield node.lineno, f"the axis {node.value} is spelled out: ask the mesh"


STORE = Path(PACKAGE, "formats", "store.py")  # alone knows the library of object stores

# Readers are given a `Folder`: these alone find, read and write files on the local disk.
ON_DISK = {
    *("folder.py", "locks.py", "output_folder.py", "rule_file.py", "tags.py", "registry.py"),
    *("store.py", "store_saves.py"),
    *("pt/archive.py", "megatron/writer.py"),
    "megatron/index_child.py",  # a program of its own, which gets bytes alone
}
OF_PATHS = {
    *("exists", "glob", "is_dir", "iterdir", "lstat", "read_bytes", "read_text", "resolve"),
    *("rglob", "stat", "unlink", "write_bytes", "write_text"),
}


def disk_faults(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """What of a reader touches the file system itself."""
    formats = Path(PACKAGE, "formats")
    if not path.is_relative_to(formats) or str(path.relative_to(formats)) in ON_DISK:
        return
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call)
        if is_call and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "a reader opens a file: ask its Folder"
        elif is_call and isinstance(node.func, ast.Attribute) and node.func.attr in OF_PATHS:
            yield node.lineno, f"a reader calls .{node.func.attr}(): ask its Folder"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("os", "shutil") and node.attr != "PathLike":
                yield node.lineno, f"a reader uses {node.value.id}.{node.attr}: ask its Folder"


# What of formats, reshard and engines touches the file system, and for what that is no checkpoint's
# folder. All else asks a `Folder`, or a path of which it knows not where it leads.
OF_THE_DISK = {
    **dict.fromkeys(("formats/folder.py", "formats/store.py"), "the two kinds of folders"),
    **dict.fromkeys(("formats/output_folder.py", "formats/locks.py"), "what is written on a disk"),
    "formats/rule_file.py": "a user's file of rules",
    "reshard/options.py": "a user's DeepSpeed config",
    "engines/memory.py": "a tmpfs",
    "engines/trainers.py": "what trainers remove",
    "engines/deepspeed/save.py": "the empty folder that DeepSpeed is told of a store",
}
DISK_CALLS = {
    *("access", "link", "listdir", "makedirs", "mkdir", "open", "remove", "rename", "replace"),
    *("rmdir", "rmtree", "scandir", "stat", "unlink", "walk", "copyfile", "copytree", "copy2"),
    *("exists", "isfile", "isdir", "lexists", "realpath", "getsize", "getmtime", "abspath"),
}
OF_NAMES = {"name", "stem", "suffix"}  # of a path that is taken apart, and leads nowhere


def checkpoint_disk_faults(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """What touches the file system for a checkpoint, which may lie in an object store."""
    inside = path.relative_to(PACKAGE)
    layer, rest = inside.parts[0], "/".join(inside.parts[1:])
    if layer not in ("formats", "reshard", "engines") or str(inside) in OF_THE_DISK:
        return
    if layer == "formats" and rest not in ON_DISK:  # `disk_faults` has looked at it
        return
    taken_apart = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in OF_NAMES
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in taken_apart:
            continue
        name, owner = called(node), ast.unparse(node.func).rpartition(".")[0]
        if (isinstance(node.func, ast.Name) and name == "open") or (name == "Path" and node.args):
            yield node.lineno, f"{name}() of a checkpoint's path: ask its folder, or `location`"
        elif owner in ("os", "os.path", "shutil") and name in DISK_CALLS:
            yield node.lineno, f"{owner}.{name} of a checkpoint's path: ask its folder"


def style_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: raise a named error"
        elif isinstance(node, ast.Call) and called(node) == "print":
            yield node.lineno, "print outside the cli"
        elif isinstance(node, ast.ExceptHandler):
            caught = (
                []
                if node.type is None
                else [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)]
            )
            if node.type is None or {"Exception", "BaseException"} & set(caught):
                yield node.lineno, "broad except"


def faults(root: Path) -> list[str]:
    """Every broken rule below `root` as "file:line: what"."""
    found: list[str] = []
    for folder in (PACKAGE, "patches", *sorted(PROGRAMS)):
        for file in sorted((root / folder).rglob("*.py")):
            text, path = file.read_text(), file.relative_to(root)
            tree = ast.parse(text)
            rows = list(import_faults(tree, path))
            if folder == PACKAGE:
                rows += axis_faults(tree, path)
                rows += disk_faults(tree, path)
                rows += checkpoint_disk_faults(tree, path)
            if folder in (PACKAGE, "patches"):
                printing = layer_of(path.with_suffix("").parts) == "cli"
                style = style_faults(tree)
                rows += [row for row in style if not (printing and row[1].startswith("print"))]
            found += [f"{path}:{line}: {what}" for line, what in sorted(set(rows))]
    return found


def test_layers_and_style() -> None:
    assert len(list((ROOT / PACKAGE).rglob("*.py"))) > 5, "the package was not found"
    assert not faults(ROOT), "\n" + "\n".join(faults(ROOT))


def needed(tree: ast.AST) -> Iterator[str]:
    """What a module imports outside of functions, for types too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                name for a in node.names for name in (node.module, f"{node.module}.{a.name}")
            )
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from needed(node)


def test_no_module_needs_itself_back() -> None:
    """At run time and for types alike."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    graph = {
        name: {*needed(ast.parse(file.read_text()))} & {*names} for name, file in names.items()
    }
    with pytest.raises(CycleError):
        TopologicalSorter({**graph, f"{PACKAGE}.errors": {f"{PACKAGE}.core.plan"}}).prepare()
    TopologicalSorter(graph).prepare()


def test_no_name_has_two_meanings() -> None:
    """Public classes, constants and aliases of types, over the whole package."""
    homes: dict[str, list[str]] = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                if name[0].isupper() and name not in SAID_BY_EACH:
                    homes.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


# what each file of a kind says of itself, and each engine
SAID_BY_EACH = {"FAMILY", "PATCHES", "LocalShard"}


# Names of other programs, and of shapes of names, that prose may give in backticks.
FOREIGN = {
    *("AutoModelForCausalLM.from_pretrained", "DDP_BFLOAT16", "InferenceCudaGraphScope"),
    *("MambaModel", "POSITION.rest", "RotaryEmbedding._apply_scaling", "_ParamAndGradBuffer"),
    *("_apply_muon_updates_cpu_offload", "_common_checkpoint_state", "_configure_basic_optimizer"),
    *("_configure_zero_optimizer", "_create_fp16_sub_groups", "_do_optimizer_sanity_check"),
    *("_get_param_fragment_func", "_get_param_groups", "_init_group", "_init_training_state"),
    *("_metadata", "_muon_momentum_buffer", "_save", "avoids_symlink_attacks", "backup_optimizer"),
    *("distributed/param_and_grad_buffer.py", "ds_to_universal.py", "except"),
    *("get_fp32_state_dict_from_zero_checkpoint", "get_standard_config_overrides", "init_state"),
    *("iter_0000100", "language_model.model.layers.0.bias", "model.language_model.layers.0.bias"),
    "load_hp_checkpoint_state_from_checkpoint_dir",
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
    *("merge_tp_slices", "nccl_start_alignment_factor", "optimizer.state.STATE.KEY"),
    *("param_group_identifier_keys", "partition_balanced", "partition_uniform"),
    *("runtime/superoffload/", "runtime/zero/stage3.py", "safe_globals.py", "snapshots/REVISION"),
    *("stage3.py", "tied_modules.KEY.rest", "weight_dequant", "zero/NAME/STATE.pt"),
    *("zero_optimizer_state", "zipfile"),
}


def prose(text: str) -> Iterator[str]:
    """Docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def words_of(tree: ast.AST) -> Iterator[str]:
    """Every name of a module, and every word of its texts of one line."""
    for node in ast.walk(tree):
        for key in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(name := getattr(node, key, None), str):
                yield from name.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "\n" not in node.value:
                yield from re.findall(r"\w+", node.value)


def unknown_names(root: Path, texts: dict[str, str]) -> list[str]:
    """Names in backticks of prose (by file) that no code below `root` has."""
    files = [
        file for top in (PACKAGE, "patches", "pretrain") for file in (root / top).rglob("*.py")
    ]
    known = {word for file in files for word in words_of(ast.parse(file.read_text()))}
    known |= {part for file in files for part in (file.stem, file.parent.name)}
    modules = {
        file.relative_to(root / PACKAGE).with_suffix("").parts
        for file in files
        if PACKAGE in file.parts
    }
    places = modules | {parts[:-1] for parts in modules}
    found: list[str] = []
    for file, text in texts.items():
        for name in re.findall(r"`([A-Za-z_][\w./]*)(?:\(\))?`", text):
            parts = tuple(filter(None, re.split(r"[./]", name)))
            is_place = len(parts) > 1 and parts[0] in LAYERS and "/" in name
            lost = is_place and parts[: 2 + (parts[:2] in places - modules)] not in places
            if name not in FOREIGN and (lost or not known.issuperset(parts)):
                found.append(f"{file}: `{name}`")
    return sorted({*found})


def test_names_in_prose_exist() -> None:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    texts = {str(file.relative_to(ROOT)): "\n".join(prose(file.read_text())) for file in files}
    assert unknown_names(ROOT, texts) == []
    planted = {"a.py": "See `formats/no_such_module`, `core/plan`, `no_such_name` and `Manifest`."}
    assert unknown_names(ROOT, planted) == [
        "a.py: `formats/no_such_module`",
        "a.py: `no_such_name`",
    ]


PLANTED = [
    ("megatron_ucp/core/box.py", "import torch", "core imports torch"),
    ("megatron_ucp/core/box.py", "from megatron_ucp.formats import base", "core imports formats"),
    ("megatron_ucp/core/box.py", "from ..families import gpt", "core imports families"),
    ("megatron_ucp/core/box.py", "from .. import formats", "core imports formats"),
    ("megatron_ucp/core/box.py", "import megatron_ucp", "core imports top"),
    ("megatron_ucp/core/box.py", "def f():\n    import deepspeed", "core imports deepspeed"),
    (
        "megatron_ucp/families/gpt.py",
        "from megatron_ucp.formats.checkpoint import Reader",
        "families imports formats",
    ),
    ("megatron_ucp/families/gpt.py", "import megatron.core", "families imports megatron"),
    (
        "megatron_ucp/formats/checkpoint.py",
        "from megatron_ucp import families",
        "formats imports families",
    ),
    ("megatron_ucp/formats/checkpoint.py", "import transformers", "formats imports transformers"),
    (
        "megatron_ucp/reshard/load.py",
        "from megatron_ucp.engines import live",
        "reshard imports engines",
    ),
    (
        "megatron_ucp/reshard/load.py",
        "import importlib\nimportlib.import_module('deepspeed.comm')",
        "reshard imports deepspeed",
    ),
    (
        "megatron_ucp/engines/live.py",
        "from deepspeed import comm",
        "engines imports deepspeed outside a function",
    ),
    ("megatron_ucp/engines/live.py", "from megatron_ucp import cli", "engines imports cli"),
    ("megatron_ucp/engines/live.py", "import pretrain.data", "engines imports programs"),
    (
        "megatron_ucp/engines/load.py",
        "def f():\n    from megatron_ucp.engines.deepspeed.live import describe",
        "what is of all engines imports the engine deepspeed",
    ),
    (
        "megatron_ucp/engines/deepspeed/model.py",
        "from megatron_ucp.engines.megatron import refuse",
        "deepspeed imports the engine megatron",
    ),
    (
        "megatron_ucp/cli.py",
        "def f():\n    from megatron_ucp.engines import live",
        "cli imports engines",
    ),
    ("megatron_ucp/errors.py", "from megatron_ucp.core import box", "errors imports core"),
    ("patches/some.py", "from megatron_ucp.engines import live", "patches imports engines"),
    ("megatron_ucp/reshard/check.py", 'x = {"tp": 1}', "the axis tp is spelled out"),
    ("megatron_ucp/engines/deepspeed/live.py", 'at.get("pp", 0)', "the axis pp is spelled out"),
    ("megatron_ucp/formats/deepspeed/run.py", "open('x')", "a reader opens a file"),
    ("megatron_ucp/formats/deepspeed/run.py", "folder.iterdir()", "a reader calls .iterdir()"),
    (
        "megatron_ucp/formats/megatron/legacy.py",
        "import os\nos.replace",
        "a reader uses os.replace",
    ),
    ("megatron_ucp/reshard/look.py", "Path(path).is_dir()", "Path() of a checkpoint's path"),
    ("megatron_ucp/engines/save.py", "os.path.exists(path)", "os.path.exists of a checkpoint's"),
    (
        "megatron_ucp/reshard/folder.py",
        "with open(path) as f:\n    pass",
        "open() of a checkpoint's",
    ),
    ("megatron_ucp/core/box.py", "print(1)", "print outside the cli"),
    ("megatron_ucp/core/box.py", "assert 1", "assert"),
    ("megatron_ucp/engines/live.py", "try:\n    f()\nexcept Exception:\n    pass", "broad except"),
    (
        "megatron_ucp/engines/live.py",
        "try:\n    f()\nexcept (OSError, BaseException):\n    pass",
        "broad except",
    ),
    ("megatron_ucp/engines/live.py", "try:\n    f()\nexcept:\n    pass", "broad except"),
]
ALLOWED = [
    ("megatron_ucp/families/gpt.py", 'x = "tp"'),
    (
        "megatron_ucp/core/box.py",
        "import math\nfrom . import layout\nfrom ..errors import UcpError",
    ),
    ("megatron_ucp/formats/checkpoint.py", "import torch\nfrom megatron_ucp.core.box import Box"),
    (
        "megatron_ucp/engines/live.py",
        "def f():\n    import deepspeed\n    import megatron_ucp_patches",
    ),
    (
        "megatron_ucp/engines/live.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deepspeed",
    ),
    ("megatron_ucp/__init__.py", "from megatron_ucp.engines.deepspeed.live import load"),
    ("megatron_ucp/engines/record.py", "from megatron_ucp.engines.deepspeed import engine"),
    ("megatron_ucp/engines/megatron/save.py", "from megatron_ucp.engines.megatron import live"),
    ("megatron_ucp/formats/pt/file.py", "import os\ndef f(p: os.PathLike): folder.open('x')"),
    ("megatron_ucp/formats/folder.py", "import os\nos.stat('x')"),
    ("megatron_ucp/cli.py", "import tqdm\nfrom megatron_ucp.reshard import convert\nprint(1)"),
    ("pretrain/data.py", "import deepspeed\nimport megatron_ucp as ucp\nassert print(1)"),
    ("tests/core/test_box.py", "import deepspeed\nassert print(1)"),
]


def plant(root: Path, path: str, text: str) -> list[str]:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return faults(root)


@pytest.mark.parametrize(("path", "text", "expected"), PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    found = plant(tmp_path, path, text)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:") and expected in found[0]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_is_not_a_fault(tmp_path: Path, path: str, text: str) -> None:
    assert plant(tmp_path, path, text) == []
