"""Expert files of a tag: one per expert of each mixture of a stage, at each model-parallel rank."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from megatron_ucp.core.experts import (
    LocalExperts,
    counts_of,
    expert_name,
    file_rank,
    is_expert,
    name_in_module,
    ranks_of,
)
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError
from megatron_ucp.formats.deepspeed.autoep import AutoEP, autoep_of
from megatron_ucp.formats.deepspeed.files import TagFolder, expert_file_name, missing_files
from megatron_ucp.formats.deepspeed.weights import Weights, shapes_by_group
from megatron_ucp.formats.pt.unpickler import TensorRef

_GROUP_OF_EXPERTS = re.compile(r"ep_size_(?P<ranks>[1-9]\d{0,5})")  # a group's name
Shares = dict[str, tuple[TensorRef, str]]  # name in the module -> tensor, name of its file


class ExpertFiles:
    """The experts of a tag folder under the names that the files have for them, in which an expert
    has the number of the whole layer."""

    def __init__(self, folder: TagFolder) -> None:
        self._folder = folder
        self._held: dict[int, Shares] = {}

    @cached_property
    def autoep(self) -> AutoEP:
        """What AutoEP stacked. Raises as `autoep_of`."""
        file = min(self._folder.names.model.values())
        return autoep_of(self._folder.tree(file), self._folder.full_path(file))

    def of(self, mp: int) -> Shares:
        """The experts in the files of a model-parallel rank. Raises ForeignFileError for one that
        two files hold and that is not the same in both, DamagedFileError for what is no expert."""
        if mp not in self._held:
            out: Shares = {}
            for (_, number, rank), file in sorted(self._folder.names.experts.items()):
                for name, ref in self._read(file, number).items() if rank == mp else ():
                    if name in out:
                        self._same(name, out[name], (ref, file))
                    out[name] = ref, file
            self._held[mp] = out
        return self._held[mp]

    def _read(self, file: str, number: int) -> dict[str, TensorRef]:
        out: dict[str, TensorRef] = {}
        for key, ref in self._folder.tree(file).items():
            name = self._name_in_module(key) if isinstance(key, str) else ""
            part = expert_name(name)
            if part is None or not isinstance(ref, TensorRef) or part.number != number:
                raise DamagedFileError(
                    "an expert file holds something else",
                    file=self._folder.full_path(file),
                    expected=f"tensors of expert {number}",
                    found=str(key)[:120],
                )
            out[name] = ref
        return out

    def _name_in_module(self, key: str) -> str:
        return self.autoep.name_in_module(key) if self.autoep else name_in_module(key)

    def _same(self, name: str, one: tuple[TensorRef, str], two: tuple[TensorRef, str]) -> None:
        sums = [
            (ref.shape, ref.storage.dtype, self._folder.file(file).record(ref.storage).crc32)
            for ref, file in (one, two)
        ]
        if sums[0] != sums[1]:
            raise ForeignFileError(
                "an expert is held by two files, which differ",
                file=self._folder.full_path(two[1]),
                parameter=name,
                expected=f"what {one[1]} holds",
                found="other bytes",
                fix="put the files of one save, and no others, into the folder",
            )

    @cached_property
    def counts(self) -> dict[str, int]:
        """Experts of each layer, by the name of its list. Raises NotFoundError for a lost file,
        ForeignFileError for one of another run."""
        self._require_ranks_of_run()
        self._complete()
        found = counts_of(
            name for mp in {mp for _, _, mp in self._folder.names.experts} for name in self.of(mp)
        )
        return {**self.autoep.experts, **found}

    def _complete(self) -> None:
        """Raises NotFoundError where the files of a mixture are not as many as the model file says,
        or leave out a number. Where experts lie in no files at all the caller knows why."""
        found: dict[int, set[int]] = {}
        for layer, number, _ in self._folder.names.experts:
            found.setdefault(layer, set()).add(number)
        told = self._told() if found else []
        for layer in sorted({*found, *range(len(told))}):
            known = layer < len(told) and type(told[layer]) is int
            numbers = found.get(layer, set())
            wanted = told[layer] if known else max(numbers, default=-1) + 1
            missing = sorted({*range(wanted)} - numbers)
            if missing:
                raise missing_files(
                    "expert file",
                    len(missing),
                    self._folder.folder / expert_file_name(layer, missing[0], 0),
                    f"experts 0 to {wanted - 1} of mixture {layer}",
                    f"{len(numbers)} of them",
                )

    def _require_ranks_of_run(self) -> None:
        """Raises ForeignFileError for the file of a rank that the run did not have."""
        names = self._folder.names
        most = max(mp for _, mp in names.model)
        for (_, _, mp), file in names.experts.items():
            if mp > most:
                raise ForeignFileError(
                    "there is an expert file of more model-parallel ranks than the run had",
                    file=self._folder.full_path(file),
                    expected=f"model-parallel ranks 0 to {most}",
                    found=f"rank {mp}",
                    fix="put the files of one save, and no others, into the folder",
                )

    def _told(self) -> list[Any]:
        """Experts of each mixture, as the model file with the most of them says."""
        said = (
            self._folder.tree(file).get("num_experts") for file in self._folder.names.model.values()
        )
        return max((one for one in said if isinstance(one, list)), key=len, default=[])

    def ranks(self, meta: Mapping[str, Any], file: str) -> int:
        """Expert-parallel ranks of the run that wrote the files, as they show it: by the optimizer
        files of stage 0, or by the experts that the model file lists for one rank."""
        if self.autoep:
            return self.autoep.ranks
        if self._folder.names.expert_optimizer or meta.get("param_shapes") is None:
            there = 1 + max((ep for ep, _ in self._folder.names.expert_optimizer), default=0)
            return max(self._ranks_by_groups(), there)
        shapes = shapes_by_group(meta, file) or []
        return ranks_of(counts_of(name for named in shapes for name in named), self.counts, file)

    def _ranks_by_groups(self) -> int:
        """Expert-parallel ranks as DeepSpeed names the optimizer's groups of experts ("ep_size_2");
        1 where no file of stage 0 says it."""
        names = self._folder.names
        for file in (*sorted(names.model.values()), *sorted(names.expert_optimizer.values())):
            tree = self._folder.tree(file).get("optimizer")
            groups: Any = tree.get("param_groups") if isinstance(tree, dict) else None
            listed: list[Any] = groups if isinstance(groups, list) else []
            named = [group.get("name") for group in listed if isinstance(group, dict)]
            sizes = [_GROUP_OF_EXPERTS.match(name) for name in named if isinstance(name, str)]
            if found := [int(size["ranks"]) for size in sizes if size is not None]:
                return max(found)
        return 1

    def lost(self, layer: str, number: int, mp: int) -> NotFoundError:
        """The error for an expert without a file."""
        file = expert_file_name(0, number, mp).replace("layer_0", "layer_*")
        expected = f"expert {number} in a file of model-parallel rank {mp}"
        error = missing_files(
            "expert file", 1, self._folder.folder / file, expected, "no such file"
        )
        error.parameter = f"{layer}.{number}"
        return error

    def local(self, mesh: Mesh, index: int) -> LocalExperts:
        """What an expert-parallel rank has of them."""
        return LocalExperts.among(self.counts, mesh.ep, index)


class WithExperts(Weights):
    """Weights whose experts lie in files of their own. `name_of` gives the canonical name of what a
    file calls an expert."""

    def __init__(
        self, beside: Weights, files: ExpertFiles, mesh: Mesh, name_of: Callable[[str, str], str]
    ) -> None:
        self._beside, self._files, self._mesh, self._name_of = beside, files, mesh, name_of
        self._held: dict[int, Shares] = {}

    def experts(self, etp: int) -> Shares:
        """Every expert's share at an expert-tensor-parallel rank, by canonical name."""
        if etp not in self._held:
            out: Shares = {}
            for stage in range(self._mesh.pp):
                for ep in range(self._mesh.ep):
                    out |= self._share(stage, ep, etp)
            self._held[etp] = out
        return self._held[etp]

    def _share(self, stage: int, ep: int, etp: int) -> Shares:
        """What a rank has of a stage's experts. Raises NotFoundError for a lost file."""
        mp, local = file_rank(self._mesh, stage, ep, etp), self._files.local(self._mesh, ep)
        held = self._files.of(mp)
        own = {name: one for name, one in held.items() if local.own_name(name) is not None}
        found = {(part.layer, part.number) for part in map(expert_name, own) if part}
        for layer in {layer for layer, _ in found}:
            first = ep * local.counts[layer]
            for number in range(first, first + local.counts[layer]):
                if (layer, number) not in found:
                    raise self._files.lost(layer, number, mp)
        return {self._name_of(name, one[1]): one for name, one in own.items()}

    def name_of(self, name: str, file: str) -> str:
        return self._beside.name_of(name, file)

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        dense = self._beside.module(tp)
        own = {name: ref for name, ref in dense.items() if not is_expert(name)}
        return own | {name: ref for name, (ref, _) in self.experts(tp % self._mesh.etp).items()}

    def file_of(self, name: str, tp: int = 0) -> str:
        held = self.experts(tp % self._mesh.etp).get(name)
        return held[1] if held else self._beside.file_of(name, tp)

    def ties(self, flat: Iterable[str]) -> tuple[Tie, ...]:
        return self._beside.ties(name for name in flat if not is_expert(name))

    def extra_states(self) -> dict[str, Any]:
        return self._beside.extra_states()

    def check(self, file: str) -> None:
        """Also an expert file with that of the first expert-tensor-parallel rank."""
        if file not in self._by_file:
            self._beside.check(file)
        first = self.experts(0)
        for name, ref in self._by_file.get(file, ()):
            want = first.get(name, (None, ""))[0]
            if want is None or want.shape != ref.shape:
                raise ForeignFileError(
                    "an expert file differs from that of the first expert-tensor-parallel rank",
                    file=file,
                    parameter=name,
                    expected=want and want.shape,
                    found=ref.shape,
                )

    @cached_property
    def _by_file(self) -> dict[str, list[tuple[str, TensorRef]]]:
        """What each expert file holds, by canonical name."""
        return grouped(
            (file, (name, ref))
            for etp in range(self._mesh.etp)
            for name, (ref, file) in self.experts(etp).items()
        )
