"""Which tags a folder has, and which of them can be resumed from."""

from dataclasses import dataclass
from pathlib import Path

from megatron_ucp import say
from megatron_ucp.errors import NotFoundError, UcpError
from megatron_ucp.formats.pointers import Named, newest_named
from megatron_ucp.formats.registry import is_hugging_face
from megatron_ucp.formats.tags import LATEST_UNIVERSAL, has_state_files, tag_folder
from megatron_ucp.reshard.arguments import plain_path
from megatron_ucp.reshard.describe import look
from megatron_ucp.reshard.findings import in_short
from megatron_ucp.reshard.inspect import date
from megatron_ucp.reshard.newest_tag import check_whole, time_of_save, unfinished


@dataclass(frozen=True)
class ListedTag:
    """A tag. `wrong` is empty where it is whole: every file there, with the size, step and mesh
    that belong to it. `pointer` is the one that names it and is followed. Of a tag that can't be
    read `step` is None and `mesh` empty."""

    tag: str
    step: int | None
    mesh: str
    saved: str
    size_bytes: int
    wrong: str
    pointer: str = ""

    @property
    def whole(self) -> bool:
        """Whether a job can resume from it."""
        return not self.wrong

    @property
    def texts(self) -> tuple[str, ...]:
        """What a table shows."""
        state = self.wrong or "whole"
        named = f", {self.pointer}" if self.pointer else ""
        step = "-" if self.step is None else f"{self.step:,}"
        size = say.amount(self.size_bytes)
        return self.tag, step, self.mesh or "-", self.saved or "-", size, f"{state}{named}"


@dataclass(frozen=True)
class Listed:
    """The tags of a folder, by step; `notes` say what else is there."""

    path: str
    tags: tuple[ListedTag, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        heads = ("tag", "step", "mesh", "saved", "size", "state")
        lines = say.table([heads, *(one.texts for one in self.tags)])
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def ls(path: str | Path) -> Listed:
    """The tags of a folder: step, mesh, date, size, whether each is whole, which one a load takes.
    Reads no tensor.

    Args:
        path: The folder above the tags. Of a tag folder that one alone is listed.

    Returns:
        The tags, by step.

    Raises:
        NotFoundError: Where there is no tag.

    Example:
        >>> import megatron_ucp as ucp
        >>> [one.tag for one in ucp.ls("runs/llama").tags if one.whole]
        ['global_step80']
    """
    folder = Path(plain_path(path))
    if not folder.is_dir() or (has_state_files(folder) and newest_named(folder) is None):
        return Listed(str(folder), (_listed(tag_folder(folder), ""),), ())
    named = newest_named(folder) or Named("", "")
    found = [one for one in folder.iterdir() if one.is_dir() and has_state_files(one)]
    if not found:
        raise _no_tags(folder)
    tags = [_listed(one, named.pointer if one.name == named.tag else "") for one in found]
    notes = [*([named.note] if named.note else []), *unfinished(folder)]
    if (folder / LATEST_UNIVERSAL).is_file():
        text = (folder / LATEST_UNIVERSAL).read_text(errors="replace").strip()
        notes.append(f"{LATEST_UNIVERSAL} names {text[:80]}, which counts where no other does")
    ordered = sorted(tags, key=lambda one: (one.step is None, one.step or 0, one.tag))
    return Listed(str(folder), tuple(ordered), tuple(notes))


def _no_tags(folder: Path) -> NotFoundError:
    if not is_hugging_face(folder):
        tag_folder(folder)  # which says what is there instead
    return NotFoundError(
        "this folder holds no tags",
        file=folder,
        expected="tag folders",
        found="a Hugging Face folder, or files alone",
        fix="give the folder of a run; `megatron-ucp inspect` takes this one",
    )


def _listed(folder: Path, pointer: str) -> ListedTag:
    wrong, step, mesh, saved = "", None, "", ""
    try:
        manifest = look(folder)
        step, mesh = int(manifest.run.get("global_steps", 0)), str(manifest.written_on)
        saved = date(time_of_save(folder))
        check_whole(folder)
    except UcpError as error:
        wrong = in_short(error)
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    return ListedTag(folder.name, step, mesh, saved, size, wrong, pointer)
