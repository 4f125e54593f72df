"""How the parameters of a checkpoint are cut and named where no manifest says so: by a family,
by rules, by stock's patterns."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.errors import LayoutError, RuleError, UcpError, UnsupportedError, some_of
from megatron_ucp.formats import expect
from megatron_ucp.formats.deepspeed.files import PATTERNS, TagFolder
from megatron_ucp.formats.deepspeed.megatron_deepspeed import INTERLEAVED, arguments_of, order_of
from megatron_ucp.formats.deepspeed.tp_patterns import StockInfo, contradicts, is_fused
from megatron_ucp.formats.deepspeed.weights import frozen_shapes, no_extra_state, shapes_by_group
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY
from megatron_ucp.formats.pt.refs import TensorRef

# ---- joined rows
#
# What stock DeepSpeed's converter makes of query_key_value, of which Megatron-DeepSpeed's
# patterns say nothing: it joins the ranks' rows one after the other.


def refuse_joined(
    meta: Mapping[str, Any], file: str, held: Iterable[tuple[str, ParamSpec]]
) -> None:
    """Raises UnsupportedError where such rows may be thirds of each rank, which are in no order
    then. `meta` is a model file of the run that was converted; `held` are parameters with their
    names in it."""
    arguments, info = arguments_of(meta.get(ARGUMENTS_KEY)), meta.get(PATTERNS)
    ranks = arguments.get("tensor_model_parallel_size", meta.get("mp_world_size"))
    if ranks == 1 or order_of(arguments) == INTERLEAVED:
        return
    for name, spec in held:
        cut = spec.layout.only_cut
        is_plain = cut is not None and not (cut.is_fused or cut.runs)
        told = order_of(arguments) == "" and is_plain
        known = told or (isinstance(info, dict) and StockInfo(info, file).is_matched(name))
        if is_fused(name) and not known:
            raise UnsupportedError(
                "the rows of query_key_value may be in no order: DeepSpeed's converter joined what "
                f"{ranks} tensor-parallel ranks had, one after the other",
                file=file,
                parameter=spec.name,
                expected="rows that are by head, as rules or the arguments of the run say",
                found="neither says so",
                fix="load or convert the native checkpoint, which megatron-ucp joins as its rules "
                "say; if the rows are by head, give --rules megatron_deepspeed_interleaved",
                id="layout-unknown",
            )


# ---- declared


_NAMED = 5  # parameters that a note lists by name


@dataclass
class LayoutSource:
    """The first that is given speaks: `specs` (of a manifest or a family), `rules`, `stock` (which
    may say nothing). `pipe` are a pipeline's names of canonical ones, which `stock` uses."""

    mesh: Mesh
    stock: StockInfo
    specs: Mapping[str, ParamSpec] | None = None
    rules: RuleSet | None = None
    pipe: Mapping[str, str] = field(default_factory=dict)
    _by_default: dict[str, None] = field(default_factory=dict, init=False)
    _by_patterns: dict[str, None] = field(default_factory=dict, init=False)
    _overruled: dict[str, None] = field(default_factory=dict, init=False)

    @property
    def is_cut(self) -> bool:
        """Whether several ranks have shares of one parameter."""
        return self.mesh.cut_of_dense > 1

    @property
    def silent(self) -> bool:
        """Whether nothing says how parameters are cut."""
        return self.specs is None and not self.stock.info and not (self.rules and self.rules.rules)

    @property
    def notes(self) -> list[str]:
        """What rests on stock's default alone, and where rules and stock's patterns disagree."""
        found = {
            "cut on dim 0 by stock DeepSpeed's default, as no pattern of universal_checkpoint_info "
            "matches": self._by_default,
            "the rules say another layout than universal_checkpoint_info": self._overruled,
        }
        return [f"{what}: {some_of(list(names), _NAMED)}" for what, names in found.items() if names]

    def find(self, name: str, local: Ints, kind: str) -> ParamSpec | None:
        """The whole parameter of which a rank holds `local`; None where nothing declares it. Raises
        RuleError, LayoutError."""
        if self.specs is not None:
            return self._told(name, local)
        if self.rules is None or not self.rules.rules:
            return self._by_stock(name, local) if self.is_cut and kind != "buffer" else None
        if kind == "buffer" and not self.rules.matching(name):
            return None
        spec = self._with_vocabulary(
            self.rules.declare(name, local, self.mesh.cuts(is_expert(name)))
        )
        if self.stock.info and kind != "buffer" and self.is_cut and not self._agrees(spec, local):
            self._overruled[name] = None
        return spec

    def _with_vocabulary(self, spec: ParamSpec) -> ParamSpec:
        """With the rows of the vocabulary that are data, where stock's patterns say them and the
        rules don't."""
        if spec.extent is not None or not self.stock.info:
            return spec
        pipe = self.pipe.get(spec.name, spec.name)
        with suppress(RuleError):  # patterns that are no use to anybody
            return replace(spec, extent=self.stock.vocabulary_of(pipe, spec.shape))
        return spec

    def _told(self, name: str, local: Ints) -> ParamSpec | None:
        """What the manifest or the family says; of a vocabulary as many rows as the ranks have, as
        a model may be padded otherwise than the files. Raises LayoutError."""
        spec = (self.specs or {}).get(name)
        if spec is not None and contradicts(spec, self.stock.order):
            raise LayoutError(
                "the rows of query_key_value are in another order in the checkpoint",
                file=self.stock.file,
                parameter=name,
                expected=spec.layout,
                found=f"{self.stock.order}, as the arguments of the run that wrote it say",
                fix="resume with the code that wrote it: no layout turns one order into the other",
            )
        cut = spec.layout.only_cut if spec is not None and spec.extent is not None else None
        if spec is None or cut is None or cut.dim or cut.is_fused or cut.runs:
            return spec
        rows = local[0] * self.mesh.cut_of_dense if local else 0
        if rows == spec.shape[0]:
            return spec
        return replace(spec, shape=(rows, *spec.shape[1:]), extent=None)

    def _by_stock(self, name: str, local: Ints) -> ParamSpec | None:
        if not self.stock.info:
            return None
        pipe = self.pipe.get(name, name)
        found = self.stock.declared(pipe, local, self.mesh.tp)
        if not is_fused(pipe) and not self.stock.is_matched(pipe):
            self._by_default[name] = None
        self._by_patterns[pipe] = None
        return replace(found, name=name)

    def check_patterns(self) -> None:
        """Once every parameter was found: raises RuleError for a pattern that matches none of them,
        where another parameter, for which it may be meant, is cut on dim 0 by default."""
        found = self.stock.unused(self._by_patterns) if self._by_default else None
        if found is not None:
            raise RuleError(
                "a pattern of universal_checkpoint_info matches no parameter, and parameters that "
                "none matches would be cut on dim 0",
                file=self.stock.file,
                expected=f"a parameter that matches {found[:200]}",
                found=f"none; no pattern matches {some_of(list(self._by_default), _NAMED)}",
                fix="give --rules FILE (Python: rules=; docs/reference/rules.md)",
                id="layout-unknown",
            )

    def _agrees(self, spec: ParamSpec, local: Ints) -> bool:
        try:
            pipe = self.pipe.get(spec.name, spec.name)
            if self.stock.is_open(pipe):
                return True
            return self.stock.declared(pipe, local, self.mesh.tp).layout == spec.layout
        except UcpError:  # patterns that are no use to anybody
            return False


def compared(manifest: Manifest, rules: RuleSet, file: str) -> Manifest:
    """A recorded manifest that no rule contradicts. One of a run without a family says nothing
    about tp > 1: there the rules' layouts take the place of its whole parameters. Raises
    RuleError."""
    for pipe, name in manifest.names.items() if rules.pipeline else ():
        compared_name(pipe, name, rules, file)
    return replace(
        manifest,
        params=tuple(compared_spec(spec, manifest, rules, file) for spec in manifest.params),
    )


def compared_name(pipe: str, name: str, rules: RuleSet, file: str) -> None:
    """Raises RuleError where a [[pipeline]] entry says another name than the manifest."""
    if (found := rules.canonical(pipe)) != name:
        raise RuleError(
            "a [[pipeline]] entry contradicts the manifest",
            file=rules.source,
            parameter=pipe,
            expected=f"{name}, as {file} says",
            found=found,
            fix="correct the rules, or leave them out",
        )


def compared_spec(spec: ParamSpec, manifest: Manifest, rules: RuleSet, file: str) -> ParamSpec:
    """One parameter of `compared`."""
    if not rules.rules or (spec.kind == "buffer" and not rules.matching(spec.name)):
        return spec
    local = manifest.local_shape(spec.name)
    ruled = rules.declare(spec.name, local, manifest.mesh.cuts(spec.expert is not None))
    if not says_layouts(manifest):
        return replace(spec, layout=ruled.layout, extent=ruled.extent or spec.extent)
    for what, ours, theirs in (
        ("layout", spec.layout, ruled.layout),
        ("vocabulary", spec.extent, ruled.extent or spec.extent),
    ):
        if ours != theirs:
            raise RuleError(
                f"a rule contradicts the manifest in the {what}",
                file=rules.source,
                parameter=spec.name,
                expected=f"{ours}, as {file} says",
                found=theirs,
                fix="correct the rule, or leave the rules out",
            )
    return spec


def says_layouts(manifest: Manifest) -> bool:
    """Whether a manifest knows how parameters are cut; one of a run at tp=1 without a family knows
    them as whole only."""
    return (
        bool(manifest.family)
        or manifest.mesh.tp > 1
        or any(
            spec.on_mesh is not None
            or not (spec.layout.is_whole or isinstance(spec.layout, Chunks))
            for spec in manifest.params
        )
    )


# ------------------------------------------------ a pipeline's names


def renamed(pipes: Iterable[str], rules: RuleSet) -> dict[str, str]:
    """Name in the pipeline -> canonical name. Raises RuleError where an entry is missing or two
    parameters get one name."""
    out = {pipe: rules.canonical(pipe) for pipe in pipes}
    first: dict[str, str] = {}
    for pipe, name in out.items():
        other = first.setdefault(name, pipe)
        if other != pipe and not (rules.may_share(pipe) and rules.may_share(other)):
            raise RuleError(
                "two parameters of the pipeline get one canonical name",
                file=rules.source,
                parameter=pipe,
                expected="one name for each, or tied = true",
                found=f"{name}, as {other} gets",
                fix=f"edit the [[pipeline]] entries of {rules.source}",
            )
    return out


def pipe_keys(folder: TagFolder, files: list[str]) -> list[str]:
    """Names in the pipeline: as the model files list them, and position and key of all other
    tensors of the layer files."""
    named = dict.fromkeys(name for file in files for name in _listed(folder, file))
    tied: dict[str, set[str]] = {}
    for name in named:
        if name.startswith(f"{TIED}."):
            head, _, rest = name.removeprefix(f"{TIED}.").partition(".")
            tied.setdefault(head, set()).add(rest)
    own = {name.partition(".")[0] for name in named}
    for (layer, rank), file in sorted(folder.names.layers.items()):
        if rank:
            continue
        keys = [
            key
            for key, value in folder.tree(file).items()
            if isinstance(value, TensorRef) and not no_extra_state(key, value)
        ]
        # the file of a tied module has the place of one of its users; its names are those of the
        # module
        if str(layer) not in own and any(rests <= set(keys) for rests in tied.values()):
            continue
        named.update(dict.fromkeys(f"{layer}.{key}" for key in keys))
    return list(named)


def _listed(folder: TagFolder, file: str) -> Iterator[str]:
    """Parameters that the model file of a stage lists, or the optimizer files beside it."""
    tree = folder.tree(file)
    path = folder.full_path(file)
    for named in [*(shapes_by_group(tree, path) or []), frozen_shapes(tree, path)]:
        yield from named
    mp = next(mp for (_, mp), name in folder.names.model.items() if name == file)
    for (_, rank), name in sorted(folder.names.optimizer.items()):
        state = expect.section(folder.tree(name) if rank == mp else {}, "optimizer_state_dict")
        mappings = state.get("param_slice_mappings")
        for named in mappings if isinstance(mappings, list) else []:
            yield from (key for key in expect.section(named) if isinstance(key, str))
