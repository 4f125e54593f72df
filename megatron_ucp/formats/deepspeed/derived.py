"""The manifest that follows from a tag's files alone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import number_and_count, of_every_expert
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Place, expert_rank_of
from megatron_ucp.errors import ModelMismatchError, RuleError
from megatron_ucp.formats.deepspeed import frozen
from megatron_ucp.formats.deepspeed.doctor import NOT_SAVED, not_saved
from megatron_ucp.formats.deepspeed.flattened import names_at, shape_of
from megatron_ucp.formats.deepspeed.frozen import unexplained
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group, training_dtype
from megatron_ucp.formats.deepspeed.optimizer_files import Contents
from megatron_ucp.formats.deepspeed.paths import at_tp
from megatron_ucp.formats.deepspeed.stage_0_files import PlainFile
from megatron_ucp.formats.deepspeed.steppers import with_rules
from megatron_ucp.formats.plain_values import number

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint


@dataclass(frozen=True)
class Derived:
    """What the files `of` a checkpoint say, whose optimizers are read."""

    of: "NativeCheckpoint"

    def manifest(self) -> Manifest:
        """The manifest that follows from the files alone, with what it says of states that were
        not saved."""
        found = self._held()
        self._refuse_renamed(found)
        names, meta = self.of.names, self.of.meta
        has_optimizer = bool(names.optimizer or names.expert_optimizer or meta.get("optimizer"))
        lost = not_saved(meta.get("ds_config"), found, has_optimizer)
        return replace(found, run={**found.run, NOT_SAVED: lost}) if lost else found

    def _held(self) -> Manifest:
        found = self.of.contents
        module = self.of.weights.module()
        members = [member.param for buffer in found.buffers for member in buffer.members]
        flat = dict.fromkeys(members)
        shapes = self._flat_shapes()
        dtype = training_dtype(self.of.meta, module, shapes)
        ties = self.of.weights.ties(flat)
        params = self._params(flat, shapes, module, dtype)
        if self.of.uneven:
            self._check_shares(params)
        # a save without frozen weights leaves further names of tied ones in the model file
        told = self.of.recorded.ties if self.of.recorded else ()
        aliases = {alias for tie in (*ties, *told) for alias in tie.aliases}
        values = self._values(module, {*flat, *aliases})
        mesh = replace(self.of.counts.mesh, zero=self._zero_stage(found))
        run = {
            key: number(self.of.meta.get(key))
            for key in ("global_steps", "skipped_steps", "ds_version")
        }
        return Manifest(
            found.keeper,
            mesh,
            (*params, *(spec for spec, _ in values)),
            (*found.buffers, *(share for spec, one in values for share in self.shares(spec, one))),
            with_rules(found.groups, self.of.meta.get("ds_config")),
            ties,
            names=self.of.pipe_names if self.of.pipeline else {},
            run=run,
        )

    def _params(
        self, flat: Iterable[str], shapes: Mapping[str, Ints], module: Mapping[str, Any], dtype: str
    ) -> list[ParamSpec]:
        """What the optimizer steps; `shapes` are those of the first rank, as far as files say."""
        # in a plain optimizer's file the weights are the masters, of whatever dtype the model is
        plain = any(isinstance(reader, PlainFile) for reader in self.of.readers)
        return [
            self._spec(
                name,
                shapes[name] if name in shapes else shape_of(self.of, module, name),
                self.of._weight_dtype(name) if plain else dtype,
                "trainable",
            )
            for name in flat
        ]

    def _flat_shapes(self) -> dict[str, Ints]:
        """Rank-local shapes of what is flattened, as the model files say: of other expert-parallel
        ranks than the first only where no expert file has their experts' shapes."""
        out: dict[str, Ints] = {}
        everywhere = not self.of.names.experts
        for at in self.of.places:
            if expert_rank_of(at) and not everywhere:
                continue
            rank = self.of.mesh.rank_of(at, 0)
            file = self.of.model_of(self.of.file_place(rank)[1])
            name_of = names_at(self.of, rank, file)
            for named in shapes_by_group(self.of.tree(file)) or []:
                inside = self.of.experts.autoep.in_slices(named, self.of.full_path(file))
                for name, shape in inside.items():
                    out.setdefault(name_of(name), shape)  # the first rank's
        return out

    def _check_shares(self, params: Sequence[ParamSpec]) -> None:
        """Raises ModelMismatchError where another tensor-parallel rank than the first one has
        another share than the layout says."""
        for tp in range(1, self.of.counts.tp):
            file = self.of.model_of(tp)
            held = dict(self.of.weights.module(tp))
            for named in shapes_by_group(self.of.tree(file)) or []:
                held |= named
            for spec in params:
                want = spec.layout.local_shape(spec.name, spec.shape, self._place(tp))
                found = getattr(held.get(spec.name), "shape", held.get(spec.name))
                if found != want and 0 not in want:
                    self._is_another(spec, found, want, file)

    def _place(self, tp: int) -> Place:
        return self.of.mesh.place(at_tp(tp))

    def _is_another(self, spec: ParamSpec, found: Any, want: Ints, file: str) -> NoReturn:
        raise ModelMismatchError(
            "the checkpoint's share of a parameter is not what its layout says",
            parameter=spec.name,
            file=self.of.full_path(file),
            found=found,
            expected=f"{want} of {spec.shape} at tp={self.of.counts.tp}",
        )

    def shares(self, spec: ParamSpec, buffer: FlatBuffer) -> Iterator[FlatBuffer]:
        """The buffer of a value: of one that ranks have different shares of, those of all ranks."""
        cuts = self.of.mesh.everywhere(buffer.axes) if self.of.uneven else []
        local = [
            spec.layout.local_shape(spec.name, spec.shape, dict(self.of.mesh.place(at)))
            for at in cuts
        ]
        if len({*local}) < 2:
            yield buffer
            return
        for at, shape in zip(cuts, local, strict=True):
            size = math.prod(shape)
            member = replace(buffer.members[0], size=size)
            length = -(-size // buffer.partitions) if buffer.rule == "each" else size
            if size:
                yield replace(buffer, members=(member,), length=length, at=at)

    def _values(
        self, module: Mapping[str, Any], known: set[str]
    ) -> list[tuple[ParamSpec, FlatBuffer]]:
        """Frozen parameters and module buffers, one flat buffer for each."""
        buffer_names = {
            self.of.weights.name_of(name, file)
            for file in self.of.first_of_stages
            for name in self.of.tree(file).get("buffer_names") or []
        }
        buffer_names = of_every_expert(buffer_names, self.of.expert_counts)
        # the files of experts have theirs, of all ranks
        named: Mapping[str, Any] = self.of.meta.get("frozen_param_shapes") or {}
        shapes = {n: s for n, s in named.items() if n not in self.of.experts.autoep.experts}
        found = frozen.values(
            {**self.of.meta, "frozen_param_shapes": shapes},
            module,
            buffer_names,
            known,
            self.of.counts.partitions if self.of.contents.keeper == Keeper.ZERO_3 else None,
            lambda name: self.of.fragment(name, 0),
            self.of.main_file,
        )
        axes = self.of.spread.axes
        return [
            (
                replace(self._spec(name, shape, buffer.states[0][1], kind), order=order),
                replace(buffer, axes=axes(name)),
            )
            for name, shape, kind, order, buffer in found
        ]

    def _refuse_renamed(self, found: Manifest) -> None:
        """Raises UnsupportedError where the weights lack parameters of the optimizer, and what
        looks like a frozen one may be one of them under another name. At ZeRO-3 the weights of
        both are elsewhere."""
        module = self.of.weights.module()
        lacking = [s for s in found.params if s.kind == "trainable" and s.name not in module]
        said = self.of.meta.get("frozen_param_shapes") or {}
        frozen = [s for s in found.params if s.kind == "frozen" and s.name not in said]
        if lacking and frozen and found.keeper != Keeper.ZERO_3:
            alike = [s.name for s in frozen if s.shape in {one.shape for one in lacking}]
            name = next(iter(alike), frozen[0].name)
            raise unexplained(name, [s.name for s in lacking], self.of.main_file)

    def _spec(self, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
        """The parameter with the declared layout, whose share of one rank must have the shape in
        the file."""
        declared = self.of.declared.find(name, local, kind)
        expert = number_and_count(name, self.of.expert_counts)
        # where nothing cuts it another shape is an error of the comparison with the target
        cut = self.of.mesh.cut_of_dense if expert is None else self.of.mesh.cut_of_experts
        other = cut == 1 and (declared is None or declared.shape != local)
        if other or (declared is None and kind == "buffer"):
            return ParamSpec(name, local, dtype, kind, expert=expert)
        if declared is None:
            raise RuleError(
                "a tensor-parallel parameter of the checkpoint is not declared",
                parameter=name,
                file=self.of.main_file,
                expected="a parameter of the family",
                found="none",
                fix="build the model as the run that wrote the checkpoint did",
            )
        shares = self.of.counts.mesh.shares()
        share = declared.layout.local_shape(name, declared.shape, shares)
        if share != local:
            self._is_another(declared, local, share, self.of.model_name)
        return replace(declared, dtype=dtype, kind=kind, expert=expert)

    def _zero_stage(self, found: Contents) -> int:
        if found.keeper == Keeper.ZERO_1_OR_2:
            return 2 if self.of.optimizer_tree(0)["zero_stage"] == 2 else 1
        return {Keeper.ZERO_3: 3, Keeper.BF16: 1}.get(found.keeper, 0)
