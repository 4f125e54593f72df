"""The verbs of the command line: what each is called, which arguments it takes, what it calls and
what it prints. No logic."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ucp.cli.output import (
    DONE,
    FOUND,
    RULES,
    add_allow,
    add_checkpoint,
    add_dtype,
    allowed,
    named,
    nearest,
    print_json,
    print_notes,
    show,
)
from megatron_ucp.cli.target import add_target, refuse_unused_size, target_of
from megatron_ucp.core.manifest import FINGERPRINT
from megatron_ucp.errors import HELP_FILE, DamagedFileError, UsageError
from megatron_ucp.reshard.options import CONVERT, EXPORT, IMPORT, OUTPUTS


@dataclass(frozen=True)
class Verb:
    """One command. `help` is its line in the list of commands, `description` what `--help` says;
    `add` adds its arguments, `options` are those by name (see `add_options`). `is_shared`:
    processes that torchrun starts do its work together."""

    name: str
    help: str
    description: str
    example: str
    run: Callable[[Any], int]
    add: Callable[[argparse.ArgumentParser], None]
    options: dict[str, str] = field(default_factory=dict[str, str])
    is_shared: bool = False


def _nothing(parser: argparse.ArgumentParser) -> None:
    """It has options alone."""


# ---- inspect


def add_inspect(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run_inspect(args: Any) -> int:
    from megatron_ucp.reshard.look import inspect

    found = inspect(args.path, **named(args, "tag", "rules"))
    summed = _summed(args) if args.fingerprint else {}
    if args.json:
        return print_json({**_inspected(found), **summed}, DONE)
    print(found)
    for name, one in summed.items():
        print(f"{name:12} {one['digest']}")
    if args.all:
        print(f"\n{found.details()}")
    return DONE


def _summed(args: Any) -> dict[str, dict[str, Any]]:
    from megatron_ucp.reshard.fingerprint import PARTS, of_path

    found = of_path(args.path, **named(args, "tag", "rules"))
    return {FINGERPRINT: {"digest": found.digest, **{key: getattr(found, key) for key in PARTS}}}


def _inspected(found: Any) -> dict[str, Any]:
    from megatron_ucp.reshard.look import experts

    manifest = found.manifest
    # a value for each parameter and state, which are long and say nothing to a reader
    return {
        "path": found.path,
        "engine": manifest.keeper,
        "family": manifest.family,
        "mesh": manifest.written_on,
        "run": {key: value for key, value in manifest.run.items() if key != FINGERPRINT},
        "has_manifest": bool(manifest.save_id),
        "parameters": len(manifest.params),
        "elements": found.elems,
        "files": len(manifest.files),
        "file_bytes": manifest.size_bytes,
        "experts": experts(manifest),
        "states": {
            name: {"dtypes": dtypes, "bytes": size} for name, (dtypes, size) in found.states.items()
        },
        "groups": [
            {"optimizer": group.optimizer, "settings": group.settings} for group in manifest.groups
        ],
        "notes": found.notes,
        "table": found.rows,
    }


# ---- ls


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the folder above the tags")


def run_ls(args: Any) -> int:
    from megatron_ucp.reshard.look import ls

    found = ls(args.path, remove_left_overs=args.remove_left_overs)
    if args.json:
        tags = [{**vars(one), "whole": one.whole} for one in found.tags]
        return print_json({"path": found.path, "tags": tags, "notes": found.notes}, DONE)
    print(found)
    return DONE


# ---- plan


_RANKS_SHOWN = 32  # ranks in the table


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_target(parser)


def run_plan(args: Any) -> int:
    from megatron_ucp.reshard import plan

    target = target_of(args, "a plan is")
    refuse_unused_size(args, target, args.path)
    found = plan.plan(args.path, target, **named(args, "tag", "rules", "ds_config"))
    if args.picture:
        plan.draw(found, args.picture)
    if args.json:
        ranks = [{**vars(one), "read_bytes": one.read_bytes} for one in found.ranks]
        return print_json({**vars(found), "ranks": ranks}, DONE)
    _print_plan(found)
    return DONE


def _print_plan(found: Any) -> None:
    print(f"{found.source_mesh}  to  {found.mesh}")
    rows = _plan_table(found.ranks)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
    if len(found.ranks) > _RANKS_SHOWN:
        print(f"and {len(found.ranks) - _RANKS_SHOWN} ranks more: --json has them all")
    total = sum(one.read_bytes for one in found.ranks)
    print(
        f"all ranks read {total / 1e6:,.1f} MB, {total / found.stored_bytes:.3f} times the states "
        "of the checkpoint"
    )
    print_notes(found.notes)


def _plan_table(ranks: Any) -> list[tuple[str, ...]]:
    heads = ("files", "MB read", "segments", "MB of states", "MB at most")
    rows: list[tuple[str, ...]] = [("rank", *ranks[0].coord.shown, *heads)]
    for one in ranks[:_RANKS_SHOWN]:
        place = map(str, (one.rank, *one.coord.shown.values(), len(one.files)))
        sizes = (one.read_bytes, one.state_bytes, one.peak_bytes)
        read, *memory = [f"{size / 1e6:,.1f}" for size in sizes]
        rows.append((*place, read, f"{one.copies:,}", *memory))
    return rows


# ---- verify


def add_verify(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run_verify(args: Any) -> int:
    from megatron_ucp.reshard.check import verify

    found = verify(args.path, **named(args, "tag", "deep", "allow_nan", "rules"))
    return show(args, found, DONE if found else FOUND, ok=found.ok)


# ---- diff


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="a tag folder, the folder above it, or a saved fingerprint"
    )
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument(
        "--limit",
        type=_count,
        default=20,
        metavar="COUNT",
        help="print at most so many differences (default 20)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number of at least 0")
    return int(text)


def run_diff(args: Any) -> int:
    from megatron_ucp.formats.registry import find_checkpoint
    from megatron_ucp.reshard.check import diff
    from megatron_ucp.reshard.fingerprint import is_kept

    found = diff(args.a, args.b, **named(args, "rules", "rules_b", "fingerprint"))
    code = FOUND if found else DONE
    if args.json:
        return print_json({"equal": not found, "differences": found}, code)
    folders = [path for path in (args.a, args.b) if not is_kept(path)]
    print_notes(note for path in folders for note in find_checkpoint(path).notes)
    lines = _lines_of(found)
    print("\n".join(lines[: args.limit]) + "\n" * bool(lines), end="")
    if len(lines) > args.limit:
        print(f"and {len(lines) - args.limit} more")
    count = f"{len(found)} difference{'s' if len(found) != 1 else ''}"
    how = ", as the saves recorded it: no tensor was read" if args.fingerprint else ""
    if found and not how and all(one.is_setting or not one.parameter for one in found):
        how = "; all parameters and their states are equal"
    print(f"{count if found else 'equal'}{how}")
    return code


def _lines_of(found: Sequence[Any]) -> list[str]:
    """A line for each difference; of a setting that differs alike for many parameters one line."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        own = () if one.is_setting else (one.parameter,)
        alike.setdefault((one.what, one.a, one.b, *own), []).append(one.parameter or "run")
    return [
        f"{who[0] if len(who) == 1 else f'{len(who)} parameters'}: {what}: {a} and {b}"
        for (what, a, b, *_), who in alike.items()
    ]


# ---- convert


def add_convert(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, optional=True)
    parser.add_argument("--input-folder", help=argparse.SUPPRESS)
    parser.add_argument(
        "output",
        nargs="?",
        metavar="OUTPUT",
        help="the new tag folder, such as converted/global_step80",
    )
    parser.add_argument("--output-folder", help=argparse.SUPPRESS)
    parser.add_argument(
        "--to",
        choices=[*OUTPUTS],
        metavar="FORMAT",
        help=", ".join(f"{name} ({meaning})" for name, meaning in OUTPUTS.items()),
    )
    add_target(parser)
    add_allow(parser, CONVERT)


def run_convert(args: Any) -> int:
    from megatron_ucp.reshard.convert import convert

    given = (args.input_folder, args.path, args.output_folder, args.output)
    paths = [path for path in given if path]
    if len(paths) != 2:
        raise UsageError(
            "convert needs a source and an output",
            expected="two paths",
            found=f"{len(paths)}",
            fix="megatron-ucp convert CHECKPOINT OUTPUT --mesh tp=1,dp=4,zero=1",
        )
    to = args.to or ("native" if args.mesh else "universal")
    target = target_of(args, "native files are" if to == "native" else "")
    refuse_unused_size(args, target, paths[0], to == "native")
    found = convert(
        paths[0],
        paths[1],
        to=to,
        target=target,
        allow=allowed(args),
        **named(args, "latest", "tag", "rules", "ds_config", "ranks"),
    )
    return show(args, found)


# ---- export-hf


_EXPORT_OPTIONS = (
    *("dtype", "max_shard_size", "tag", "rules", "config", "family"),
    *("tokenizer", "verify", "force", "ranks"),
)
_EXPORT_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_export_hf(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("output", metavar="OUTPUT", help="the new folder")
    add_dtype(
        parser,
        _EXPORT_DTYPES,
        "of the weights, to which the fp32 master weights are rounded: float32, bfloat16, float16 "
        "(default: that of training)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default 5GB)"
    )
    parser.add_argument(
        "--family",
        default="",
        metavar="NAME",
        help="where neither the checkpoint nor its config says one",
    )
    add_allow(parser, EXPORT)


def run_export_hf(args: Any) -> int:
    from megatron_ucp.reshard.hugging_face.export import export_hf

    found = export_hf(
        args.path,
        args.output,
        allow=allowed(args),
        **named(args, *_EXPORT_OPTIONS),
    )
    return show(args, found, DONE if found.loadable and found.complete else FOUND)


# ---- import-hf


def add_import_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FOLDER", help="with config.json and the safetensors files")
    parser.add_argument(
        "output", metavar="OUTPUT", help="the new tag folder, such as llama/global_step0"
    )
    add_target(parser)
    parser.add_argument(
        "--family",
        default="",
        metavar="NAME",
        help="of megatron-core's modules (default: as config.json says)",
    )
    parser.add_argument(
        "--padded-vocab-size",
        type=int,
        metavar="ROWS",
        help="of the vocabulary with padding, which is zeros (default: as many as there are)",
    )
    add_allow(parser, IMPORT)


def run_import_hf(args: Any) -> int:
    from megatron_ucp.formats.tags import require_folder
    from megatron_ucp.reshard.hugging_face.import_hf import import_hf

    require_folder(args.path)  # before what the arguments lack
    target = target_of(args, "native files are")
    refuse_unused_size(args, target, None)
    found = import_hf(
        args.path,
        args.output,
        target=target,
        padded_vocab=args.padded_vocab_size,
        allow=allowed(args),
        **named(args, "latest", "family", "ds_config", "ranks"),
    )
    return show(args, found)


# ---- run


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs="*", help="the script, or -m module, with its arguments")


def run_run(args: Any) -> int:
    from megatron_ucp.run import main

    return main(args.script)


# ---- doctor


def run_doctor(args: Any) -> int:
    from megatron_ucp.reshard.look import doctor

    found = doctor()
    code = DONE if found else FOUND
    if args.json:
        return print_json({"ok": bool(found), "rows": found.rows}, code)
    print(found)
    return code


# ---- help


_PACKAGE = Path(__file__).parent.parent


def add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", help="as in `help:` of an error")


def run_help(args: Any) -> int:
    found = sections()
    if args.id is None:
        return print_json({"ids": [*found]}, DONE) if args.json else _list_errors(found)
    if args.id not in found:
        # a text that somebody searches for, such as the beginning of another program's error
        wanted = args.id.casefold()
        hits = {name: text for name, text in found.items() if wanted in text.casefold()}
        if len(hits) > 1:
            return print_json({"ids": [*hits]}, DONE) if args.json else _list_errors(hits)
        if hits:
            (args.id,) = hits
    if args.id not in found:
        raise UsageError(
            f"there is no help for {args.id[:80]!r}",
            expected=", ".join(found),
            found=args.id[:200],
            fix=nearest(args.id, [*found], "megatron-ucp help"),
        )
    if args.json:
        return print_json({"id": args.id, "text": found[args.id]}, DONE)
    print(found[args.id])
    return DONE


def _list_errors(found: dict[str, str]) -> int:
    width = max(map(len, found))
    for name, text in found.items():
        first = text.partition("```text\n")[2].partition("\n")[0]
        print(f"{name:{width}}  {first}")
    return DONE


def _for_terminal(text: str) -> str:
    """A page without what a terminal has no use for: comments, and the targets of links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->\n", "", text))


def sections() -> dict[str, str]:
    """The sections of the page by their ids, as an installation has them, or a checkout. Raises
    DamagedFileError where neither has it."""
    for page in (_PACKAGE / Path(HELP_FILE).name, _PACKAGE.parent / HELP_FILE):
        if page.is_file():
            text = _for_terminal(page.read_text(encoding="utf-8"))
            parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
            return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    raise DamagedFileError(
        "this installation lacks its page of errors",
        file=_PACKAGE / Path(HELP_FILE).name,
        fix="install the package again",
        id="",
    )


VERBS = (
    Verb(
        "inspect",
        "what a checkpoint is: format, model, step, mesh, optimizer, size",
        """\
What a checkpoint is: format, model, step, mesh, optimizer, dtypes, date, size. Reads no tensor
and imports no torch, but for a fingerprint.""",
        "inspect runs/llama --all",
        run_inspect,
        add_inspect,
        {
            "--all": "also settings, groups, the model's sizes, and the table of parameters",
            "--fingerprint": "also read every byte: what the state is, on whatever mesh it lies",
        },
    ),
    Verb(
        "ls",
        "the tags of a folder, and which of them are whole",
        """\
The tags of a folder: step, mesh, date, size, whether each is whole, and which one a load
takes.""",
        "ls runs/llama",
        run_ls,
        add_ls,
        {
            "--remove-left-overs": "in an object store, also remove what saves left that were not "
            "finished; nobody may be saving there meanwhile",
        },
    ),
    Verb(
        "plan",
        "the dry run of a resume on another mesh, and a picture of it",
        """\
What a resume on another mesh would read, rank by rank: files, bytes, memory. Nothing is loaded:
it is the dry run of a resume, and of `convert`.""",
        "plan runs/llama --mesh dp=3,zero=1 --picture plan.png",
        run_plan,
        add_plan,
        {
            "--picture FILE": "draw who reads what from whom into a PNG, PDF or SVG file",
        },
    ),
    Verb(
        "verify",
        "whether a checkpoint is whole; with --deep every byte of it",
        """\
Whether a checkpoint is whole: every file, exact cover; with --deep every byte, every copy, every
number. All damage is listed.""",
        "verify runs/llama --deep",
        run_verify,
        add_verify,
        {
            "--deep": "read everything: checksums, copies of one parameter, NaN",
            "--allow-nan": "don't look for NaN, which is no corruption",
        },
    ),
    Verb(
        "diff",
        "compare two checkpoints of any meshes bit by bit",
        """\
Two checkpoints of any formats and meshes, compared bit by bit: fp32 master weights, optimizer
states, steps, hyper-parameters, schedules.""",
        "diff runs/llama converted/global_step80",
        run_diff,
        add_diff,
        {
            **RULES,
            "--rules-b FILE": "other rules for B",
            "--fingerprint": "compare what the saves recorded of their bytes, and read no tensor",
        },
    ),
    Verb(
        "convert",
        "write files for another mesh, for Megatron-LM, FSDP2 or torchtitan, or a universal folder",
        """\
One checkpoint as another one on disk: DeepSpeed's files for another mesh, its universal folder,
or a folder for Megatron-LM. Not needed to resume: a job loads any checkpoint as it is.

OUTPUT is the new tag folder: it must not exist, and appears as a whole or not at all. The source is
never touched. `plan` is the dry run. Weights for transformers are written by `export-hf`.""",
        "convert runs/llama converted/global_step80 --mesh dp=3,zero=1",
        run_convert,
        add_convert,
        {
            "--latest": "let the pointer (`latest`) of the folder above name OUTPUT; it does "
            "anyway where that folder is a run of the same format without one"
        },
        is_shared=True,
    ),
    Verb(
        "export-hf",
        "write the weights as a folder that transformers loads",
        """\
The weights of a checkpoint as a folder that transformers loads, straight from the files of any
mesh. Replaces zero_to_fp32.py; --dtype float32 gives its dtype.

OUTPUT is the new folder: it must not exist, and appears as a whole or not at all. Neither a GPU nor
DeepSpeed nor Megatron is needed.""",
        "export-hf runs/llama hf --dtype bf16 --verify",
        run_export_hf,
        add_export_hf,
        {
            "--config FILE_OR_FOLDER": "the model's config.json, or its folder (an adapter's "
            "adapter_config.json); tokenizer files are copied from there. Default: what the "
            "checkpoint says, else the file beside it",
            "--tokenizer FOLDER": "copy the tokenizer files of this folder",
            "--verify": "read the files back and compare them with the checkpoint, bit by bit",
            "--force": "replace OUTPUT, if this command wrote it and nobody changed it since",
        },
        is_shared=True,
    ),
    Verb(
        "import-hf",
        "write DeepSpeed's files from a folder of a Hugging Face model",
        """\
A folder of a Hugging Face model as DeepSpeed's files for any mesh, before the first step of
training. Not needed to train: an engine loads the Hugging Face folder itself.

OUTPUT is the new tag folder: it must not exist, and appears as a whole or not at all.""",
        "import-hf hf start/global_step0 --mesh tp=2,dp=2,zero=1",
        run_import_hf,
        add_import_hf,
        {
            "--latest": "let `latest` of the folder above name OUTPUT; it does anyway where that "
            "folder is a run without one"
        },
        is_shared=True,
    ),
    Verb(
        "run",
        "run a training script, which then resumes on any mesh",
        """\
Runs a training script of DeepSpeed or Megatron-LM unchanged: its saves are atomic, and it loads
what any mesh saved. The same as `python -m megatron_ucp.run`.""",
        (
            "run train.py --epochs 3\n"
            "  torchrun --nproc_per_node 6 -m megatron_ucp.run train.py --epochs 3"
        ),
        run_run,
        add_run,
        {},
    ),
    Verb(
        "doctor",
        "versions beside those that were tested",
        """\
What this machine has: versions of torch, DeepSpeed, megatron-core, transformers and others beside
those that were tested.""",
        "doctor",
        run_doctor,
        _nothing,
        {},
    ),
    Verb(
        "help",
        "says more about an error, by the id in its last line",
        """\
What the line `help:` of an error names: the text, why it comes, and what to do. A part of an
error's text finds its section, too. Without an ID all of them.""",
        "help no-checkpoint",
        run_help,
        add_help,
        {},
    ),
)
