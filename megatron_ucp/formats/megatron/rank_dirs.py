"""The folders of Megatron-LM's older files, one for each model-parallel rank, and the states of
optimizers that lie in them by position."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import (
    ForeignFileError,
    NotFoundError,
    StateMismatchError,
    UnsupportedError,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.megatron.arguments import OF_VALUES
from megatron_ucp.formats.megatron.checkpoint import MegatronFolder
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import TensorRef

# ---- rank folder
#
# The folders of Megatron-LM's older files: what each model-parallel rank has in one.


OF_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
RANDOM = "rng_state"  # of the first file
_MOST_MISSING = 10_000  # folders of ranks


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of a model-parallel rank: tensor-parallel rank, stage, expert-parallel rank."""

    tp: int
    stage: int
    expert: int

    def name(self, mesh: Mesh) -> str:
        """As Megatron-LM calls it in a run on a mesh."""
        stage = f"_{self.stage:03d}" if mesh.pp > 1 else ""
        expert = f"_{self.expert:03d}" if mesh.ep > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}{expert}"


class RankFolders(MegatronFolder):
    """An opened tag folder as its ranks' files. A subclass sets `_main` and `_folders`."""

    _main: str
    _folders: Mapping[RankFolder, str]

    @property
    def _has_optimizer(self) -> bool:
        """Whether the optimizer's states are there, and wanted."""
        return bool(self.main_tree.get("optimizer")) and not self.told.weights

    @property
    def _has_buffers(self) -> bool:
        """Whether data-parallel ranks shared these states; else each parameter has its own."""
        return self._has_optimizer and bool(self.arguments.get("use_distributed_optimizer"))

    # ------------------------------------------------ files

    @property
    def main_tree(self) -> Mapping[str, Any]:
        return self._tree(self._main)

    def _tree(self, name: str) -> Mapping[Any, Any]:
        """What a file holds; an older one of several optimizers lists them."""
        tree, path = self.file(name).tree, self.folder / name
        if isinstance(tree, list):
            tree = dict(enumerate(tree))
        return expect.kind(tree, dict, "the file", path)

    def _model(self, rank: RankFolder, chunk: int) -> Mapping[str, Any]:
        """The weights of a chunk of a rank, by their local names."""
        name = self._model_file(rank)
        key = "model" if self.saved_on.vpp == 1 else f"model{chunk}"
        held = expect.key(self._tree(name), key, dict, self.folder / name)
        expect.texts(list(held), key, self.folder / name)
        return held

    def file(self, name: str) -> PtFile:
        if name not in self._open:
            opened = self._closing.enter_context(PtFile(self.folder.open(name), allow=OF_VALUES))
            self.evidence.compare(name, opened.size_bytes, opened.directory_sha256)
            self._open[name] = opened
        return self._open[name]

    def _scan(self) -> dict[RankFolder, str]:
        """The folder of each rank. Raises NotFoundError for those that are missing,
        UnsupportedError for a mesh whose experts are cut otherwise."""
        mesh = self.saved_on
        if self.arguments.get("num_experts") and mesh.cut_of_experts != mesh.cut_of_dense:
            raise UnsupportedError(
                "experts that are cut otherwise than the rest are not read from these files",
                file=self.main_file,
                found=str(mesh),
                fix="save it again with --ckpt-format torch_dist",
            )
        self._require_listable()
        ranks = itertools.product(range(mesh.pp), range(mesh.ep), range(mesh.tp))
        out = {rank: rank.name(mesh) for rank in (RankFolder(tp, pp, ep) for pp, ep, tp in ranks)}
        missing = [name for name in self._names(out) if not self.folder.is_file(name)]
        if missing:
            raise self._missing(
                self.folder / missing[0], f"those of {mesh}", f"{len(missing)} missing"
            )
        found = {name for name in self.folder.names() if OF_RANK.fullmatch(name)}
        if odd := sorted(found - {*out.values()}):
            raise ForeignFileError(
                "there are folders of ranks that the run did not have",
                file=self.folder / odd[0],
                expected=str(mesh),
                found=f"{len(odd)} such folders",
            )
        return out

    def _require_listable(self) -> None:
        """Raises NotFoundError where far more ranks are missing than a list of them could name."""
        mesh, here = self.saved_on, len(self.folder.names())
        wanted = mesh.pp * mesh.ep * mesh.tp
        if wanted > here + _MOST_MISSING:
            raise self._missing(str(self.folder), f"{wanted} folders, those of {mesh}", f"{here}")

    def _missing(self, file: str, expected: str, found: str) -> NotFoundError:
        return NotFoundError(
            "files of model-parallel ranks are missing",
            file=file,
            expected=expected,
            found=found,
            fix="restore them, or load another tag",
        )

    def _names(self, folders: Mapping[RankFolder, str]) -> list[str]:
        kinds = [MODEL_FILE, *([OPTIMIZER_FILE] if self._has_buffers else [])]
        return [f"{folder}/{kind}" for folder in folders.values() for kind in kinds]

    @property
    def file_names(self) -> list[str]:
        return self._names(self._folders)

    def _compare_files(self) -> None:
        """Raises ForeignFileError for a file of another iteration."""
        for folder in self._folders.values():
            found = self._tree(f"{folder}/{MODEL_FILE}").get("iteration")
            if found != self.main_tree.get("iteration"):
                raise ForeignFileError(
                    "a file is of another iteration than the others",
                    file=self.folder / f"{folder}/{MODEL_FILE}",
                    expected=self.main_tree.get("iteration"),
                    found=found,
                )

    def _model_file(self, rank: RankFolder) -> str:
        return f"{self._folders[rank]}/{MODEL_FILE}"

    @property
    def _optimizers(self) -> list[Mapping[str, Any]]:
        return self._optimizers_in(self._main)

    def _optimizers_in(self, name: str) -> list[Mapping[str, Any]]:
        """The optimizer of a file, or each one of a chain; none where there is none."""
        found = self._tree(name).get("optimizer") or []
        listed = found if isinstance(found, list) else [found]
        return [*expect.each(listed, dict, "optimizer", self.full_path(name))]


# ---- by position
#
# States of Megatron's optimizers that are not distributed, in its older files: they have no
# names, and lie group by group in the order in which the model registered what it trains.


InModelOrder = Sequence[tuple[str, TensorRef]]  # weights by name, in the order of the model
_OF_HALF = "fp32_from_fp16_params"  # masters of weights in half precision, by group
_FULL, _STEP = "float32", "step"


def inner_tree(tree: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """What torch's optimizer keeps of one of Megatron's."""
    return expect.key(tree, "optimizer", dict, file) if "optimizer" in tree else tree


def steps_in(inner: Mapping[str, Any], file: str) -> list[TensorRef]:
    """The tensors that count steps, of each parameter."""
    states = expect.key_or(inner, "state", {}, file).values()
    found = [expect.kind(one, dict, "the state of a parameter", file).get(_STEP) for one in states]
    return [ref for ref in found if isinstance(ref, TensorRef)]


@dataclass
class StatesByPosition:
    """`found` has the element-wise states of each parameter of a rank, masters among them."""

    file: str
    found: dict[str, dict[str, TensorRef]] = field(default_factory=dict[str, dict[str, TensorRef]])

    def add(self, tree: Mapping[str, Any], groups: Sequence[InModelOrder]) -> None:
        """Takes one optimizer, of whose `groups` these are the weights. Raises StateMismatchError
        where they are not, DamagedFileError."""
        inner, file = inner_tree(tree, self.file), self.file
        listed = expect.each(
            expect.key_or(inner, "param_groups", [], file), dict, "param_groups", file
        )
        states = expect.key_or(inner, "state", {}, file)
        for number, named in enumerate(groups):
            ids = listed[number].get("params") if number < len(listed) else None
            halves = [one for one in named if one[1].storage.dtype != _FULL]
            masters = iter(self._paired(halves, self._masters(tree, number)))
            for (name, weight), at in self._paired(named, ids):
                half = weight.storage.dtype != _FULL
                own = {MASTER: next(masters)[1] if half else weight}
                own |= self._of_param(states.get(at) or {})
                for state, ref in own.items():
                    self._check(name, state, weight, ref)
                self.found[name] = own

    def _masters(self, tree: Mapping[str, Any], number: int) -> Any:
        listed = tree.get(_OF_HALF) or []
        return listed[number] if number < len(listed) else []

    def _of_param(self, kept: Any) -> dict[str, TensorRef]:
        refs = expect.kind(kept, dict, "the state of a parameter", self.file).items()
        return {k: ref for k, ref in refs if isinstance(ref, TensorRef) and k != _STEP}

    def _paired(
        self, named: InModelOrder, listed: Any
    ) -> Iterator[tuple[tuple[str, TensorRef], Any]]:
        """Weights with what a list has at their places. Raises StateMismatchError."""
        count = len(listed) if isinstance(listed, list) else None
        if count != len(named):
            raise StateMismatchError(
                "a group of the optimizer has another number of parameters than the model",
                file=self.file,
                expected=f"{len(named)}: {', '.join(name for name, _ in named)}"[:200],
                found=count,
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )
        return zip(named, listed, strict=True)

    def _check(self, name: str, state: str, weight: TensorRef, ref: Any) -> None:
        """Raises StateMismatchError for a state that is none of this parameter."""
        good = isinstance(ref, TensorRef) and ref.is_contiguous and ref.storage.dtype == _FULL
        if not good or ref.shape != weight.shape:
            raise StateMismatchError(
                "what the optimizer keeps at the place of a parameter is not its state",
                file=self.file,
                parameter=f"{name} ({state})",
                expected=f"{weight.shape} in {_FULL}",
                found=f"{getattr(ref, 'shape', ref)}"[:100],
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )


def one_step(steps: Collection[float], file: str) -> float | None:
    """The step that all parameters of a file have; None where it counts none by tensors. Raises
    StateMismatchError."""
    if len(steps) > 1:
        raise StateMismatchError(
            "parameters were stepped a different number of times",
            file=file,
            expected="one step",
            found=", ".join(f"{step:g}" for step in sorted(steps)),
            fix="load the weights alone (Python: load_optimizer_states=False)",
        )
    return next(iter(steps), None)
