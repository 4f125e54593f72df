"""What a conversion takes from its source besides tensors: config, scheduler, loss scale, the
layers of its pipeline."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import TENSOR, Stand
from megatron_ucp.errors import UcpError
from megatron_ucp.families import families, recorded_model
from megatron_ucp.families.arguments import with_model
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed.declared import says_layouts
from megatron_ucp.formats.deepspeed.model_file import training_dtype
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.target import Target, config_for
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.of_ranks import Apart, refuse_unless
from megatron_ucp.formats.optimizers import kept_by
from megatron_ucp.formats.pt.known import KNOWN
from megatron_ucp.formats.pt.pickler import check_stand
from megatron_ucp.formats.pt.strangers import named_in
from megatron_ucp.formats.rank_differences import apart_in, ranks_of
from megatron_ucp.reshard.match import replica_notes, require_one_copy, scheduler_for
from megatron_ucp.reshard.wanted import Wanted

CLIP_GRAD = 1.0  # DeepSpeed's default
VERSION = "0.19.8"  # whose files are written, where the source's don't say theirs


class Origin:
    """A source as a conversion sees it. `ruled`: a file of rules was given. `notes` say what had to
    be assumed."""

    def __init__(self, source: Checkpoint, ruled: bool) -> None:
        self.source, self.extras = source, source.extras
        self.manifest = with_model(source.manifest)
        self.config: Mapping[str, Any] = self.extras.config or {}
        self.notes: list[str] = []
        self.apart = Apart()
        self._declared = ruled or says_layouts(self.manifest)
        trained = [spec.dtype for spec in self.manifest.params if spec.kind == "trainable"]
        self.dtype = trained[0] if trained else training_dtype({"ds_config": self.config}, {}, ())

    def take_values(self, mesh: Mesh | None, allow: Collection[str]) -> None:
        """Looks at plain values: whether they can be written again, and what ranks have otherwise
        than each other. That goes to files for the same ranks (None: to none); else it is
        refused, or the first rank's is taken where that is allowed.

        Raises StateMismatchError, UnsafePickleError, UnsupportedError."""
        apart = apart_in(self.source)
        self._check_names(apart)
        if not apart.what:
            return
        if mesh is not None and mesh.has_ranks_of(ranks_of(self.source)):
            self.apart = apart
            return
        file, here = str(self.source.folder), str(mesh or "a format without ranks")
        self.notes.append(refuse_unless("per_rank" in allow, apart.what, file, here))

    def _check_names(self, apart: Apart) -> None:
        """Notes classes of the run's program that values name, as the written files name them
        again. Raises UnsafePickleError for what only a call makes: nobody here knows what it
        would do; UnsupportedError for an object that can't be written."""
        extras, names = self.extras, set[str]()
        kept = [extras.scheduler, extras.client_state, extras.others]
        kept += [extras.modules, extras.stateless, extras.data_position]
        kept += [part for group in self.manifest.groups for part in (group.settings, group.marks)]
        kept += [part for own in apart.ranks for part in (own.buffers, own.client_state)]
        kept += [own.scheduler for own in apart.ranks]
        for item in named_in(kept):
            try:
                if isinstance(item, Stand):
                    check_stand(item)
            except UcpError as error:
                error.file = self.source.main_file
                raise
            if item.qualname not in (*KNOWN, TENSOR):
                names.add(item.qualname)
        if names:
            listed = ", ".join(sorted(names))[:200]
            self.notes.append(f"values name classes of the program that wrote them: {listed}")

    def wanted(
        self, target: Target, config: Mapping[str, Any] | None, allow: Collection[str] | None = None
    ) -> Wanted:
        """What is asked for: the target with everything that the config of its job says, or else
        the source's. Raises UsageError; LayoutError where no engine could be built so."""
        self.notes += require_one_copy(self.source, self.manifest.by_name, allow)
        self.notes += replica_notes(self.manifest)
        if config is None and self.extras.config is None and target.dtype is None:
            target = replace(target, dtype=self.dtype)
        target = target.completed(self.config if config is None else config)
        if target.mesh.tp > 1 and (model := recorded_model(self.manifest)) is not None:
            model.check_cut(target.mesh.tp)  # heads, which shapes alone do not show
        layers = self._layers() if target.mesh.pp > 1 else None
        file = str(self.source.folder)
        return Wanted(self.manifest, target, file, layers, self._declared, self._permuted)

    @property
    def _permuted(self) -> bool:
        """Whether the order of the groups is that of `round_robin_gradients`."""
        settings = self.config.get("zero_optimization")
        return (
            self.manifest.keeper == Keeper.ZERO_1_OR_2
            and isinstance(settings, dict)
            and bool(settings.get("round_robin_gradients"))
        )

    def _layers(self) -> Layers | None:
        """The layers of the pipeline that the model has, or would have; None where nobody knows
        them."""
        names = [spec.name for spec in self.manifest.params]
        # not `find_family`: a family that this process does not know is no reason to refuse
        family = families().get(self.manifest.family)
        if family is not None and family.layers is not None:
            return family.layers(names).with_values(names)
        found = self.source.layers()
        return None if found is None else found.with_values(names)

    def settings(
        self, wanted: Wanted, manifest: Manifest, config: Mapping[str, Any] | None
    ) -> RunSettings:
        """What the files say besides the manifest. `config` is the DeepSpeed config of the
        target, None for the source's."""
        config = self.config if config is None else config
        dtype = wanted.target.dtype or self.dtype
        scaler = self.extras.scaler
        if dtype != "float16" and scaler.dynamic:
            self.notes.append("the dynamic loss scale of fp16 has no place in the target")
        elif dtype == "float16" and self.dtype != "float16":
            scaler = LossScale.fresh(config)
            self.notes.append(
                f"the loss scale of fp16 begins anew, at {scaler.cur_scale:g}: the source has none"
            )
        return RunSettings(
            self.extras,
            config_for(wanted.target, config, dtype),
            self.extras.version or VERSION,
            dtype,
            scaler,
            self._clip_grad(config),
            self._int_steps(manifest),
            lambda stage: self._scheduler(manifest, stage),
            self.apart,
        )

    def _clip_grad(self, config: Mapping[str, Any]) -> float:
        key = "gradient_clipping"
        for value in (config.get(key), self.extras.clip_grad, self.config.get(key)):
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return CLIP_GRAD

    def _int_steps(self, manifest: Manifest) -> bool:
        """Whether the target's optimizer keeps its step as an int: as its class does, or as the
        source has it."""
        known = [kept_by(g.optimizer, g.settings) for g in manifest.groups if g.optimizer]
        kinds = {kept.step for kept in known if "step" in kept.scalar}
        return self.extras.int_steps if kinds in (set(), {"either"}) else "int" in kinds

    def _scheduler(self, manifest: Manifest, stage: int) -> Any:
        """The scheduler's state for one stage of the target."""
        firsts: dict[int, str] = {}
        for buffer, member, group in manifest.stepped():
            if buffer.stage == stage:
                firsts.setdefault(group, member.param)
        origins = [self.manifest.group_number(name) for _, name in sorted(firsts.items())]
        return scheduler_for(self.extras.scheduler, origins, len(self.manifest.groups))
