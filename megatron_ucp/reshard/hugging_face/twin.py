"""A model under the names of Hugging Face: what each tensor holds of which parameter."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.shares import Share
from megatron_ucp.errors import (
    DamagedFileError,
    ModelMismatchError,
    UnsupportedError,
    UsageError,
    some_of,
)
from megatron_ucp.families import find_family
from megatron_ucp.families.architecture import (
    Architecture,
    described,
    described_architecture,
    other_sizes,
)
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.base import Family, Model, Sizes
from megatron_ucp.families.hugging_face import HuggingFace
from megatron_ucp.formats.base import Told
from megatron_ucp.formats.hugging_face.checkpoint import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_json,
)
from megatron_ucp.formats.tags import require_folder
from megatron_ucp.reshard.hugging_face.adapter import (
    Adapter,
    adapter_of,
    check_adapter_config,
    not_merely_added,
)
from megatron_ucp.reshard.hugging_face.model_config import config_at, twins
from megatron_ucp.reshard.hugging_face.plain_config import check_given, with_tie
from megatron_ucp.reshard.hugging_face.released import names_note, reader, released_names

# Settings of transformers that no tensor's shape shows.
_COMPUTED = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "num_experts_per_tok"),
    *("hidden_act", "activation_function", "sliding_window", "tie_word_embeddings"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
)
_MOST_PIECES = 10**6  # key-value groups and experts of all layers
_NOT_IN_SHAPES = ("heads", "groups", "head_dim", "tied")  # sizes that tensors don't show
_OURS = "embedding.word_embeddings.weight"  # every model of megatron-core has it


@dataclass(frozen=True)
class Twin:
    """`shares` by the names of tensors, in the order of the model; `specs` are the whole
    parameters. `config` is config.json, None where nobody says it; an adapter has files of other
    names. `notes` say what the class computes a little otherwise."""

    shares: Mapping[str, Share]
    specs: Mapping[str, ParamSpec]
    config: Mapping[str, Any] | None = None
    family: str = ""
    weights_file: str = WEIGHTS_FILE
    config_file: str = CONFIG_FILE
    notes: Sequence[str] = ()

    @property
    def is_adapter(self) -> bool:
        return self.weights_file == ADAPTER_FILE

    @property
    def told(self) -> Told:
        """What a reader of the folder has to know, where it is of a family or an adapter."""
        return Told(specs=self.specs, shares=self.shares)


def twin_of(
    manifest: Manifest, config: Mapping[str, Any] | None, family: str, dtype: str, file: str
) -> Twin:
    """The twin of a checkpoint, for an export in `dtype`. `config` is what `given_config` reads,
    `family` the name of one (else the checkpoint's).

    Raises UnsupportedError for what Hugging Face's class can't represent, ModelMismatchError that
    lists every parameter which is not the model's, UsageError where nobody says what the model is.
    """
    manifest = with_model(manifest)
    name = family or manifest.family
    if not name:
        adapter = adapter_of(manifest, file)
        if adapter is not None:
            return _adapter(manifest, adapter, config, file)
        return _plain(manifest, config, dtype, file)
    found, twin = _family(name, file)
    sizes, architecture = _described(manifest, found, config, file)
    sizes = found.fitted(sizes, manifest.by_name)
    model = Model(found, sizes)
    _check_params(manifest, model, file, padded=config is None)
    whole = twin.whole_config(sizes, architecture, dtype)
    kept = whole if config is None else _in_dtype(config, dtype)
    shares, notes = twin.tensors(sizes), twin.notes(sizes, architecture)
    _require_tensors(shares, model, file)
    return Twin(shares, _true(manifest, model), kept, name, notes=notes)


def needs_family(manifest: Manifest) -> bool:
    """Whether a checkpoint has megatron-core's names, and says no family."""
    return not with_model(manifest).family and _OURS in manifest.by_name


def pipe_names(family: str, config: str | Path | None) -> Mapping[str, str] | None:
    """Names in a pipeline of the model that a config says, of which a stock checkpoint says
    nothing; None where nobody says family and config. Raises as `config_at` and `twin_of`."""
    if not family or config is None:
        return None
    found, _ = _family(family, str(config))
    return Model(found, _read(found, config_at(config).tree, str(config))[0]).pipe or None


def read_twin(
    folder: Path, family: str = "", names: Collection[str] = ()
) -> tuple[Twin, Sizes, Architecture]:
    """The twin that a Hugging Face folder's config.json says, its sizes and architecture; with the
    `names` of the parameters that it is for.

    Raises UnsupportedError where no family is its model's, or computes what the config asks for,
    NotFoundError where there is no such folder.
    """
    require_folder(folder)
    file, config = str(folder / CONFIG_FILE), read_json(folder / CONFIG_FILE)
    known = twins()
    kind = config.get("model_type")
    named = [name for name, twin in known.items() if twin.has(kind)]
    if family:
        find_family(family)  # that there is one
    if not named or family not in ("", *named):
        raise UnsupportedError(
            "the folder holds the model of another family"
            if named
            else "the folder holds a model that no family describes",
            file=file,
            expected=known[family].model_type
            if family in known
            else ", ".join(sorted(twin.model_type for twin in known.values())),
            found=kind,
            fix="use a model of the family that config.json says"
            if named
            else "train it with transformers under DeepSpeed, which needs no family: "
            "ucp.load takes the folder as it is",
        )
    found, twin = _family(family or named[0], file)
    sizes, architecture = _read(found, config, file)
    sizes = found.fitted(sizes, names)
    specs = {name: one.spec(name, "", "frozen") for name, one in found.table(sizes).items()}
    notes = twin.notes(sizes, architecture)
    whole = Twin(twin.tensors(sizes), specs, config, found.name, notes=notes)
    return whole, sizes, architecture


def told_by(folder: Path, like: Manifest) -> Told:
    """What a reader of a Hugging Face folder has to know so that its parameters have the names of
    another checkpoint."""
    family = with_model(like).family
    if family:
        return read_twin(folder, family, like.by_name)[0].told
    return Told(like=like, tensors=reader(lambda: config_in(folder), like))


def config_in(folder: Path) -> Mapping[str, Any]:
    """config.json of a folder; nothing where it has none. Raises DamagedFileError."""
    return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def check_config(folder: Path, model: Model, architecture: Architecture | None) -> None:
    """Compares a folder's config.json with a live model: tensors of one shape may be of models that
    compute something else. Raises ModelMismatchError that lists every difference."""
    _, sizes, said = read_twin(folder, model.family.name)
    if faults := _differences((sizes, said), (model.sizes, architecture)):
        raise ModelMismatchError(
            "the folder's model computes something else than the engine's",
            file=folder / CONFIG_FILE,
            expected="the same sizes and settings",
            found="; ".join(faults),
            fix="build the model as config.json says",
        )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config of transformers says of what no tensor's shape shows."""
    rope: object = config.get("rope_parameters")
    more = cast("Mapping[str, Any]", rope) if isinstance(rope, dict) else {}
    found = {key: config.get(key) for key in _COMPUTED}
    found |= {f"rope_parameters.{key}": value for key, value in more.items()}
    return {
        key: value for key, value in found.items() if isinstance(value, bool | int | float | str)
    }


def other_settings(said: Mapping[str, Any], config: Mapping[str, Any], where: str) -> list[str]:
    """A note where the settings that `settings_of` found in the place `where` are other ones than
    those of a live model. Versions have other keys: what one side alone says is no difference."""
    own = settings_of(config)
    found = [
        f"{key} {value} in {where}, {own[key]} in the model"
        for key, value in said.items()
        if key in own and own[key] != value
    ]
    return [f"the model computes something else: {'; '.join(found)}"] if found else []


def _differences(
    config: tuple[Sizes, Architecture], model: tuple[Sizes, Architecture | None]
) -> list[str]:
    """What a config says otherwise than the model, of what no tensor's shape shows."""
    pairs = [(name, getattr(config[0], name), getattr(model[0], name)) for name in _NOT_IN_SHAPES]
    for one in fields(config[1]) if model[1] is not None else ():
        if one.name != "positions":  # the longest sequence is the run's own
            pairs.append((one.name, getattr(config[1], one.name), getattr(model[1], one.name)))
    return [
        f"{name}: {theirs} in config.json, {ours} in the model"
        for name, theirs, ours in pairs
        if theirs != ours
    ]


# ------------------------------------------------ parts


def _family(name: str, file: str) -> tuple[Family, HuggingFace]:
    """A family and its twin. Raises UnsupportedError for one without."""
    found = find_family(name)
    if found.hugging_face is None:
        raise UnsupportedError(
            "the family has no twin in Hugging Face's transformers",
            file=file,
            found=name,
            expected=", ".join(twins()),
            fix="give the family `hugging_face` (see families/hugging_face)",
        )
    return found, found.hugging_face


def _described(
    manifest: Manifest, family: Family, config: Mapping[str, Any] | None, file: str
) -> tuple[Any, Architecture]:
    """Sizes and architecture: of the config that was given, else as the checkpoint records them.
    Where there are both they must agree."""
    try:
        other = other_sizes(manifest.run, family.sizes)
        if other and manifest.family not in ("", family.name):
            raise ModelMismatchError(
                "the checkpoint records the sizes of another family",
                file=file,
                expected=f"the sizes of {family.name}",
                found=f"those of {manifest.family}, which differ in {some_of(other)}",
                fix="leave --family (Python: family=) out: the checkpoint says its model itself",
            )
        found = described(manifest.run, family.sizes)
        computes = described_architecture(manifest.run)
        if found is not None:
            _require_sizes(found[0])
        if computes is not None:
            _require_numbers(computes)
    except (TypeError, ValueError) as error:
        raise DamagedFileError(
            "what the manifest says of the model can't be read", file=file, found=str(error)[:200]
        ) from None
    said = None if config is None else _read(family, config, CONFIG_FILE)
    both = found
    if both is None and said is not None and computes is not None:
        both = said[0], computes  # attached without a family: no sizes were recorded
    if said is not None and both is not None and (faults := _differences(said, both)):
        raise ModelMismatchError(
            "the config is of a model that computes something else than the checkpoint's",
            file=file,
            expected="the same sizes and settings",
            found="; ".join(faults),
            fix="leave --config (Python: config=) out: the checkpoint says its model itself",
        )
    if said is None and found is None:
        raise UsageError(
            "the checkpoint does not say what its model computes: number of heads, epsilon, ...",
            file=file,
            expected="a save of this version, or a config",
            found="none",
            fix="give --config (Python: config=) the config.json of the model",
            id="no-config",
        )
    return said or found  # type: ignore[return-value]


def _read(family: Family, config: Mapping[str, Any], file: str) -> tuple[Any, Architecture]:
    twin = family.hugging_face
    kind = config.get("model_type")
    if twin is None or not twin.has(kind):
        raise ModelMismatchError(
            "the config is of another model than the checkpoint's family",
            file=file,
            expected=twin.model_type if twin else None,
            found=kind,
        )
    try:
        found = twin.read(config)
        _require_sizes(found[0])
        return found
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        lacks = isinstance(error, KeyError)
        raise DamagedFileError(
            "config.json does not say the model's sizes",
            file=file,
            expected=f"a number for {error}" if lacks else None,
            found="none" if lacks else f"{type(error).__name__}: {error}",
            fix="give the config.json of the model",
        ) from None


def _require_sizes(sizes: Any) -> None:
    """Raises ValueError for sizes of no model, before tables of that size are made."""
    least = dict.fromkeys(("hidden", "heads", "groups", "head_dim"), 1)
    said = vars(sizes).items()
    if wrong := [f"{n} {v}" for n, v in said if not isinstance(v, int) or v < least.get(n, 0)]:
        raise ValueError("; ".join(wrong))
    pieces = sizes.layers * (sizes.groups + getattr(sizes, "experts", 0))
    if pieces > _MOST_PIECES:
        raise ValueError(f"{sizes.layers} layers in {pieces} pieces, more than any model has")


def _require_numbers(architecture: Architecture) -> None:
    """Raises ValueError for numbers that no model computes with."""
    numbers = {one.name: getattr(architecture, one.name) for one in fields(architecture)}
    del numbers["activation"], numbers["odd"]
    if wrong := [f"{n} {v}" for n, v in numbers.items() if not 0 <= v < math.inf]:
        raise ValueError("; ".join(wrong))


def _check_params(manifest: Manifest, model: Model, file: str, padded: bool) -> None:
    """Raises ModelMismatchError that lists every parameter which is not as the model has it;
    `padded`: the model's vocabulary is that of the files, with their padding."""
    table, faults = model.table, list[str]()
    faults += [f"{name}: missing" for name in table if name not in manifest.by_name]
    for spec in manifest.params:
        if spec.name not in table:
            faults.append(f"{spec.name}: a {spec.kind} that {model.family.name} lacks")
            continue
        declared = table[spec.name]
        # a config says the true rows of a vocabulary, and files hold the padded ones
        rows = model.sizes.true_vocab if declared.extent else 0
        first = 1 if rows and not padded else 0
        if declared.shape[first:] != spec.shape[first:] or spec.shape[:first] < (rows,)[:first]:
            faults.append(f"{spec.name}: {list(spec.shape)} instead of {list(declared.shape)}")
        elif rows and spec.extent is not None and rows < spec.extent.true:
            faults.append(f"{spec.name}: {spec.extent.true} rows of tokens, of which {rows} stay")
    if faults:
        raise ModelMismatchError(
            f"the checkpoint is not of the {model.family.name} that was said",
            file=file,
            expected=f"{len(table)} parameters",
            found=some_of(faults, between="; "),
            fix="what Hugging Face's class lacks can't be exported; else give the config.json of "
            "the model",
        )


def _require_tensors(shares: Mapping[str, Share], model: Model, file: str) -> None:
    """Raises UnsupportedError for a parameter that would be in no tensor of an export."""
    lost = sorted(model.table.keys() - {share.param for share in shares.values()})
    if lost:
        raise UnsupportedError(
            "Hugging Face's class has no tensor for a parameter",
            file=file,
            parameter=some_of(lost),
            expected=f"a tensor for each parameter of {model.family.name}",
            fix="export the model under a family whose rows have it",
        )


def _true(manifest: Manifest, model: Model) -> dict[str, ParamSpec]:
    """Without the rows of a vocabulary that are padding."""
    rows = model.sizes.true_vocab
    return {
        spec.name: replace(spec, shape=(rows, *spec.shape[1:]), extent=None)
        if model.table[spec.name].extent
        else spec
        for spec in manifest.params
    }


def _plain(manifest: Manifest, config: Mapping[str, Any] | None, dtype: str, file: str) -> Twin:
    """Of a model that transformers itself built: names are what they are."""
    if _OURS in manifest.by_name:
        raise UsageError(
            "the checkpoint holds a model of megatron-core, and does not say its family",
            file=file,
            parameter=_OURS,
            expected=", ".join(twins()),
            found="none",
            fix="give --config (Python: config=) the config.json of the model, or --family "
            "(family=) where that says none",
            id="no-config",
        )
    known, notes = None, list[str]()
    shares: Mapping[str, Share] = {name: Share(name) for name in manifest.by_name}
    if config is not None:
        check_given(config, manifest.by_name, file)
        known, notes = with_tie(_in_dtype(config, dtype), manifest)
        names = released_names(config, manifest.by_name)
        notes += names_note(names, config.get("model_type"))
        shares = shares if names is None else names.shares
    return Twin(shares, manifest.by_name, known, notes=notes)


def _in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config that was given, for weights in `dtype`: transformers 4 has another key for it."""
    keys = ("dtype", "torch_dtype") if "torch_dtype" in config else ("dtype",)
    return {**config, **dict.fromkeys(keys, dtype)}


def _adapter(
    manifest: Manifest, adapter: Adapter, config: Mapping[str, Any] | None, file: str
) -> Twin:
    """Of the adapter that peft put around a model, without that model."""
    if config is not None:
        check_adapter_config(adapter, manifest, config, file)
        config = {**config, "inference_mode": True}  # as peft saves it: to be used
    left = adapter.left_out(config)
    files = {param: name for param, name in adapter.files.items() if param not in left}
    notes: list[str] = []
    if left:
        notes.append(
            f"NOT IN THE ADAPTER: {len(left)} tensors that were trained beside it, for which "
            f"peft's files have no place: {some_of(left)}. {_way_that_keeps(config)}"
        )
    if adapter.tables:
        notes.append(
            f"without {some_of(adapter.tables)}: frozen, and left out of the save. peft writes it "
            "too, and does not need it"
        )
    shares = {name: Share(param) for param, name in files.items()}
    specs = {param: manifest.by_name[param] for param in files}
    return Twin(shares, specs, config, "", ADAPTER_FILE, ADAPTER_CONFIG_FILE, notes=notes)


def _way_that_keeps(config: Mapping[str, Any] | None) -> str:
    """What writes, or gives, all that was trained, where an adapter's file can't hold it."""
    values = (
        "ucp.fp32_state_dict(PATH) has all that was trained, for load_state_dict(strict=False) of "
        "the wrapped model"
    )
    if config is not None and not not_merely_added(config):
        return f"--merge BASE (Python: merge=) writes the base model with all of it; {values}"
    return values
