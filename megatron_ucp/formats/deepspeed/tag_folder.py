"""The files of one tag folder, each opened once."""

import resource
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.keys import (
    HELPERS,
    MEMBERS_OF_ARGUMENTS,
    OF_ARGUMENTS,
    OWN_KEYS,
)
from megatron_ucp.formats.deepspeed.paths import TagFiles, is_optimizer_file, scan
from megatron_ucp.formats.listed_files import Recorded
from megatron_ucp.formats.opened_folder import OpenedFolder
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.formats.pt.strangers import Strangers

CLASSES = "classes"  # of a manifest's run: that plain values of the program have
MEMBERS = "members"  # of a manifest's run: of enums that pickles name by value
# keys of a model file under which a program's own values stand, beside its client state
_OF_PROGRAMS = frozenset({"lr_scheduler", *HELPERS})


class TagFolder(OpenedFolder):
    """The files of DeepSpeed's folders; `evidence` is what the manifest beside them lists."""

    def __init__(
        self,
        folder: Path,
        classes: frozenset[str] | None = frozenset(),
        without_optimizer: bool = False,
    ) -> None:
        super().__init__(folder)
        self._told_classes = classes
        self._without_optimizer = without_optimizer
        names = scan(folder)
        self.names: TagFiles = names.without_optimizer if without_optimizer else names
        self._trees: dict[str, Any] = {}
        self._closing.callback(self.evidence.close)

    @cached_property
    def evidence(self) -> Recorded:
        if self._without_optimizer:
            return Recorded(self.folder, self.names.names, is_optimizer_file)
        return Recorded(self.folder, self.names.names)

    def file(self, name: str) -> PtFile:
        """An open file of the tag folder. Raises ForeignFileError where it is not the file that the
        manifest names."""
        if name not in self._open:
            _allow_descriptors(len(self._open))
            is_value = _is_value if name in self.names.model.values() else _is_no_value
            strangers = Strangers(is_value, self._classes, self._members)
            file = self._closing.enter_context(PtFile(self.folder / name, strangers=strangers))
            self._open[name] = file
            self.evidence.compare(name, file.size_bytes, file.directory_sha256)
        return self._open[name]

    @cached_property
    def _classes(self) -> frozenset[str] | None:
        """Classes that values may name: the caller's own, and those that the save's manifest
        says. Nothing of them is imported."""
        said: Any = self.recorded.run.get(CLASSES, ()) if self.recorded is not None else ()
        if self._told_classes is None or not isinstance(said, list | tuple):
            return self._told_classes
        return self._told_classes | OF_ARGUMENTS | {str(name) for name in said}

    @cached_property
    def _members(self) -> Mapping[tuple[str, Any], str]:
        """Members of enums that the save's program pickled by their values, as its manifest says:
        (class, value) -> name."""
        said: Any = self.recorded.run.get(MEMBERS, ()) if self.recorded is not None else ()
        told = dict(map(self._member, said if isinstance(said, list | tuple) else [None]))
        return MEMBERS_OF_ARGUMENTS | told

    def _member(self, said: Any) -> tuple[tuple[str, Any], str]:
        known = isinstance(said, list | tuple) and len(said) == 3
        if not known or not isinstance(said[1], str | int | float | None):
            raise DamagedFileError("the manifest does not say members of enums", file=self.folder)
        return (str(said[0]), said[1]), str(said[2])

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        return self.names.names

    def tree(self, name: str) -> Any:
        """The pickled tree of a file, a dict."""
        if name not in self._trees:
            tree = self.file(name).tree
            if not isinstance(tree, dict):
                raise DamagedFileError(
                    "a state file holds no dictionary",
                    file=self.full_path(name),
                    found=type(tree).__name__,
                )
            self._trees[name] = tree
        return self._trees[name]

    def check_beside(self) -> None:
        """Compares what the manifest lists besides state files. Raises ForeignFileError."""
        for name in self.evidence.files.keys() - set(self.file_names):
            if not (self._without_optimizer and is_optimizer_file(name)):
                self.evidence.read(name)


def _is_value(key: str) -> bool:
    """Whether a key of a model file holds values of the program that wrote it."""
    return key in _OF_PROGRAMS or key not in OWN_KEYS


def _is_no_value(key: str) -> bool:
    """Other files have such values in parameter groups alone."""
    return False


def _allow_descriptors(held: int) -> None:
    """Lets this process hold as many files as it may: a folder of thousands is read with all of
    them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and 2 * held + 128 > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
