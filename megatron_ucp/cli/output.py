"""Exit codes, arguments and output that several commands share."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import dtype_name
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.reshard.options import TABLE, words_at

DONE, FOUND, UNUSABLE = 0, 1, 2
SCHEMA_VERSION = 1  # of what --json prints; a field may come without a new number, none may go
EXIT_CODES = (
    "exit code: 0 done; 1 a difference, damage, or a folder that no library loads; "
    "2 wrong usage or unusable input"
)


class Parser(argparse.ArgumentParser):
    """Errors are ours, and name what is nearest to a wrong word."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=self._fix(message))

    def _fix(self, message: str) -> str:
        wrong = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if wrong != message and wrong.startswith("-"):
            every = [name for action in self.every_action() for name in action.option_strings]
            # another command may have it
            known = [name for name in every if name != wrong]
            return nearest(wrong, known, self.prog)
        if "required" in message:
            words = [str(one.metavar) for one in self._actions if not one.option_strings]
            return f"call it as `{self.prog} {' '.join(words)}`; see `{self.prog} --help`"
        return nearest("", (), self.prog)

    def every_action(self) -> list[argparse.Action]:
        """The options of this parser, and of all commands below it."""
        out: list[argparse.Action] = []
        for action in self._actions:
            out.append(action)
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    out += parser._actions
        return out

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar
        raise UsageError(
            f"{name} has no value {value!r}"[:200],
            expected=", ".join(choices),
            found=str(value)[:200],
            fix=_ELSEWHERE.get(str(value).lower(), nearest(str(value), choices, self.prog)),
        )


_OF_HUGGING_FACE = "`megatron-ucp export-hf` writes a folder of Hugging Face"
# what is no value of an option, as a command of its own does it
_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("hf", "huggingface", "hugging_face", "transformers", "safetensors"), _OF_HUGGING_FACE
    ),
    **dict.fromkeys(("fsdp", "fsdp2"), "FSDP2 loads dcp, accelerate and torchtitan"),
    **dict.fromkeys(("megatron", "mcore"), "Megatron-LM loads torch_dist"),
    **dict.fromkeys(("deepspeed", "zero"), "DeepSpeed loads native and universal"),
}


# what is gone, and what to do instead
_RETIRED = {
    "rules": "`megatron-ucp plan CHECKPOINT --mesh MESH --rules FILE` tries a file of rules",
    "--simulate": "a plan is of a checkpoint: leave --simulate out",
    "--rates": "a plan counts bytes and files, and no seconds: leave --rates out",
    "--merge": "export the adapter, of target_parameters too, and merge it by peft "
    "(docs/hugging-face.md)",
}


def nearest(word: str, known: Sequence[str], program: str) -> str:
    """What to do about a wrong word."""
    if word in _RETIRED:
        return _RETIRED[word]
    alike = [one for one in known if len(word) > 2 and one.startswith(word)]
    near = alike or get_close_matches(word, known, n=1)
    return f"did you mean {' or '.join(near)}?" if near else f"see `{program} --help`"


def add_checkpoint(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The arguments that say which checkpoint is meant; with `optional` the path may be left
    out."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?" if optional else None,
        help="a tag folder, or the folder above it, whose newest tag is taken",
    )
    add_options(parser, {"--tag TAG": "another tag in that folder", **RULES})


def add_options(parser: argparse.ArgumentParser, rows: Mapping[str, str]) -> None:
    """Options by name, with what they are for; one with no word for a value is a switch."""
    for row, text in rows.items():
        name, _, value = row.partition(" ")
        how: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        parser.add_argument(name, help=text, **how)


# how a checkpoint is sharded, where it does not say so itself
RULES = {
    "--rules FILE": "a TOML file that says how parameters are sharded and named, where neither the "
    "checkpoint nor a family does (docs/reference/rules.md)"
}


def add_allow(parser: argparse.ArgumentParser, door: str) -> None:
    """--allow, whose words each say what may happen: those that act at a door (see
    `reshard/options`)."""
    listed = "; ".join(f"{word}: {TABLE[word].meaning}" for word in words_at(door))
    parser.add_argument(
        "--allow",
        metavar="WORDS",
        default="",
        help=f"what may happen besides exact copies, between commas. {listed}",
    )


def allowed(args: Any) -> frozenset[str]:
    return frozenset(filter(None, args.allow.replace(" ", "").split(",")))


def add_dtype(parser: argparse.ArgumentParser, choices: tuple[str, ...], help: str) -> None:
    """--dtype, which takes the short names too."""
    parser.add_argument("--dtype", type=dtype_name, choices=choices, metavar="DTYPE", help=help)


def named(args: Any, *names: str) -> dict[str, Any]:
    """Options that a function takes under the names of the command line."""
    return {name: getattr(args, name) for name in names}


def show(args: Any, found: Any, code: int = DONE, **more: Any) -> int:
    """The result of a command as it was asked for; returns the exit code. As JSON its fields, and
    `more` of them; else findings, notes and its line."""
    if args.json:
        return print_json({**vars(found), **more}, code)
    _print_findings(getattr(found, "findings", ()))
    print_notes(getattr(found, "notes", ()))
    print(found)
    return code


def _print_findings(findings: Any) -> None:
    for one in findings:
        print(": ".join(filter(None, (one.parameter, one.what))))
        for key in ("file", "expected", "found"):
            if getattr(one, key):
                print(f"  {key}: {getattr(one, key)}")


def print_notes(notes: Any) -> None:
    """What is not as in the source, or could not be looked at."""
    for note in notes:
        print(f"note: {note}")


def print_json(tree: Mapping[str, Any], exit_code: int) -> int:
    """One JSON object; returns the exit code, which is in it."""
    head = {"schema_version": SCHEMA_VERSION, "exit_code": exit_code}
    print(json.dumps({**head, **plain(tree)}, allow_nan=False))
    return exit_code


def plain(value: Any) -> Any:
    """A value as JSON has it: meshes as objects, NaN and infinity as text."""
    if isinstance(value, Mesh):
        return asdict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _mesh_or(key, plain(one)) for key, one in _fields(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _mesh_or(str(key), plain(one)) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _mesh_or(key: str, value: Any) -> Any:
    if key not in ("mesh", "source_mesh") or not isinstance(value, str):
        return value
    try:
        return asdict(Mesh.parse(value))
    except UcpError:  # "universal", "Hugging Face llama"
        return value
