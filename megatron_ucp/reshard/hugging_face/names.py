"""Which tensor of a Hugging Face model holds what of a parameter, by family or by the model's
own config."""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import OTHER_ANGLES, RECORDED, Manifest, ParamSpec, Tie
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.errors import (
    DamagedFileError,
    ModelMismatchError,
    NotFoundError,
    StoreError,
    UcpError,
    UnsupportedError,
    UsageError,
    some_of,
)
from megatron_ucp.families import families, find_family
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.family import Family, HuggingFace, Model, Sizes
from megatron_ucp.families.settings import (
    Architecture,
    described,
    described_architecture,
    described_sizes,
    other_sizes,
)
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.hugging_face.checkpoint import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_json,
)
from megatron_ucp.formats.megatron.names import number_of_layer
from megatron_ucp.formats.store import Location, location
from megatron_ucp.formats.tags import require_folder
from megatron_ucp.formats.wrapped_model import unwrapped_name
from megatron_ucp.reshard.hugging_face.adapter import Adapter, adapter_of, check_adapter_config
from megatron_ucp.reshard.hugging_face.released import (
    ModelClass,
    class_of,
    names_note,
    reader,
    released_names,
)

# ---- plain config
#
# What a config.json that somebody gives for a model of transformers says of its tensors, as far
# as any model's config does: the rows and the width of the table of tokens, how many layers there
# are, and whether the head is the table of tokens. transformers leaves out layers that a config
# does not count, with a warning, and draws a head that the files lack and the config does not
# tie.


_TOKENS = re.compile(r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in)\.weight")
# as _TOKENS, with the names that other lists of rows have, too: they count where a head is tied
_TABLE = re.compile(
    r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in|shared|tok_embeddings|embeddings|"
    r"token_embedding|tokens_embed|embedding)\.weight"
)
_HEAD = re.compile(
    r"(.+\.)?(lm_head|embed_out|output_projection|proj_out|output_layer|lm_head\.decoder|"
    r"predictions\.decoder|decoder_head|generator_lm_head|output|head|lm_loss|pred_layer\.proj)"
    r"\.weight"
)
_TIED = "tie_word_embeddings"
_TEXT = re.compile(r".*(text|language|llm|decoder|thinker|talker).*")  # keys of configs of texts
_LAYER = re.compile(r"(.*?\b(?:layers|h))\.(\d+)\..+")
_WIDTH = ("hidden_size", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer")


def check_given(config: Mapping[str, Any], params: Mapping[str, ParamSpec], file: str) -> None:
    """Raises ModelMismatchError that lists every size which the tensors contradict. A model with
    several tables of tokens or lists of layers (an encoder and a decoder) has more than one answer,
    and is not asked."""
    found: dict[str, tuple[int, object]] = {}
    tables = [spec.shape for name, spec in params.items() if _TOKENS.fullmatch(name)]
    if len(tables) == 1 and len(tables[0]) == 2:
        found |= _said(config, ("vocab_size",), tables[0][0])
        # OPT's table may be narrower than the model
        if config.get("word_embed_proj_dim") is None:
            found |= _said(config, _WIDTH, tables[0][1])
    numbers: dict[str, set[int]] = {}
    for name in params:
        if layer := _LAYER.fullmatch(name):
            numbers.setdefault(layer[1], set()).add(int(layer[2]))
    if len(numbers) == 1:
        (of_layers,) = numbers.values()
        found |= _said(config, _LAYERS, max(of_layers) + 1)
    if wrong := {key: (here, said) for key, (here, said) in found.items() if here != said}:
        raise ModelMismatchError(
            "the config is of another model than the checkpoint",
            file=file,
            expected="; ".join(f"{key} {here}" for key, (here, _) in wrong.items()),
            found="; ".join(f"{key} {said}" for key, (_, said) in wrong.items()),
            fix="give the config.json of the model that was trained",
        )


def _said(
    config: Mapping[str, Any], keys: tuple[str, ...], here: int
) -> dict[str, tuple[int, object]]:
    """What a config says of a size that is `here` in the tensors, where it says anything."""
    return {key: (here, config[key]) for key in keys if type(config.get(key)) is int}


# ------------------------------------------------ the head


def is_tied(manifest: Manifest) -> bool | None:
    """Whether the head of a model is its table of tokens: one tensor under two names, or two
    tensors; None where there is no such head, or several tables."""
    heads, tables = set[str](), set[str]()
    for tie in manifest.ties:
        names = [tie.canonical, *tie.aliases]
        if any(map(_HEAD.fullmatch, names)) and any(map(_TABLE.fullmatch, names)):
            return True
    for spec in manifest.params:
        if len(spec.shape) == 2 and spec.kind != "buffer":
            heads |= {spec.name} if _HEAD.fullmatch(spec.name) else set()
            tables |= {spec.name} if _TABLE.fullmatch(spec.name) else set()
    rows = {manifest.by_name[name].shape for name in heads}
    fitting = [name for name in tables if manifest.by_name[name].shape in rows]
    return False if len(heads) == len(fitting) == 1 else None


def with_tie(config: Mapping[str, Any], manifest: Manifest) -> tuple[Mapping[str, Any], list[str]]:
    """The config with `tie_word_embeddings` as the tensors are, in it and in the configs of texts
    in it; a note where it said something else. Readers draw a head that they don't find where the
    config does not tie it, and drop a trained one where it does."""
    tied = is_tied(manifest)
    if tied is None:
        return config, []
    said = {place: value for place, value in _flags(config) if value is not tied}
    changed = _with_flag(config, tied)
    if not said:
        return changed, []
    what = (
        "the head is the table of tokens, one tensor"
        if tied
        else "the head and the table of tokens are two tensors"
    )
    places = ", ".join(said)
    return changed, [
        f"{places} is {str(tied).lower()} in the exported config.json, and was "
        f"{str(not tied).lower()}: {what}"
    ]


def _flags(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, bool]]:
    """What a config, and the configs of texts in it, say of the tie."""
    if isinstance(config.get(_TIED), bool):
        yield f"{place}{_TIED}", config[_TIED]
    for key in _texts(config):
        yield from _flags(config[key], f"{place}{key}.")


def _texts(config: Mapping[str, Any]) -> Collection[str]:
    return [key for key, value in config.items() if isinstance(value, dict) and _TEXT.match(key)]


def _with_flag(config: Mapping[str, Any], tied: bool, inner: bool = False) -> dict[str, Any]:
    """A config of a text in another one gets the flag only where it has it, or its class's default
    may be another one."""
    own = {} if inner and _TIED not in config and "vocab_size" not in config else {_TIED: tied}
    texts = {key: _with_flag(config[key], tied, inner=True) for key in _texts(config)}
    return {**config, **texts, **own}


# ---- model config
#
# Which config.json, or adapter_config.json, says what the model of a checkpoint is.


# A key that the file has where it is of transformers, or of peft: other programs write a
# config.json, too.
_KEYS = {CONFIG_FILE: "model_type", ADAPTER_CONFIG_FILE: "peft_type"}


def twins() -> dict[str, HuggingFace]:
    """The twins in transformers by the names of their families."""
    found = families().values()
    return {one.name: one.hugging_face for one in found if one.hugging_face is not None}


@dataclass(frozen=True)
class FoundConfig:
    """A config, and the folder that it lies in, where the tokenizer's files may lie too."""

    tree: Mapping[str, Any]
    folder: Location

    @property
    def family(self) -> str:
        """The first family of megatron-core's models whose twin in transformers has this config;
        empty where there is none."""
        kind = self.tree.get("model_type")
        return next((name for name, twin in twins().items() if twin.has(kind)), "")


def config_at(given: str | Location, name: str = CONFIG_FILE) -> FoundConfig:
    """The config that a user named, by the file or by its folder. Raises UsageError for a path that
    is none, NotFoundError, DamagedFileError."""
    _check_path(given, name)
    path = location(given)
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(
            f"there is no {name} here",
            file=path,
            expected=f"a folder with {name}, or that file",
            found="a folder without it" if path.is_dir() else "no such file or folder",
            fix="give the folder of the model, as save_pretrained wrote it (--config; Python: "
            "config=)",
            id="no-config",
        )
    return FoundConfig(read_json(file), file.parent)


def _check_path(given: Any, name: str) -> None:
    if not isinstance(given, str | os.PathLike):
        raise UsageError(
            "this is no path of a config",
            expected=f"a folder with {name}, or that file",
            found=repr(given)[:200],
            fix="give the path of the folder (--config; Python: config=)",
        )


def config_for(
    manifest: Manifest, given: str | Location | None, folder: Location | None
) -> FoundConfig | None:
    """The config of a checkpoint's model: the one that was given; else, where the checkpoint does
    not say its model, what lies in its `folder` or in the one above, where trainers write it; None
    where there is none. Raises as `config_at`."""
    manifest, _ = _unwrapped(with_model(manifest), None)
    is_adapter = not manifest.family and adapter_of(manifest, str(folder)) is not None
    name = ADAPTER_CONFIG_FILE if is_adapter else CONFIG_FILE
    if given is not None:
        return config_at(given, name)
    if folder is None or (manifest.family and manifest.run.get(RECORDED)):
        return None
    for place in (folder, folder.absolute().parent):
        if (place / name).is_file():
            found = config_at(place, name)
            if _KEYS[name] in found.tree:
                return found
    return None


def family_of(given: str | Path | None) -> str:
    """The family of a config that was given; empty where it says none. Raises UsageError for what
    is no path."""
    if given is not None:
        _check_path(given, CONFIG_FILE)
    try:
        return "" if given is None else config_at(given).family
    except StoreError:
        raise
    except UcpError:  # whoever needs it reads it again
        return ""


# ---- twin
#
# A model under the names of Hugging Face: what each tensor holds of which parameter.


# Settings of transformers that no tensor's shape shows.
_COMPUTED = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "num_experts_per_tok"),
    *("hidden_act", "activation_function", "sliding_window", "tie_word_embeddings"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
)
_MOST_PIECES = 10**6  # key-value groups and experts of all layers
_NOT_IN_SHAPES = ("heads", "groups", "head_dim", "tied")  # sizes that tensors don't show
# one of these every model of megatron-core, or of Megatron-DeepSpeed, has
_OF_NO_CLASS = {
    "mtp.layers.": "layers that predict further tokens (MTP)",
    "decoder.final_norm.": "the layers of a hybrid model",
    ".mixer.": "the mixers of a hybrid model",
}
_OURS = ("embedding.word_embeddings.weight", "language_model.encoder.final_layernorm.weight")


@dataclass(frozen=True)
class Twin:
    """`shares` by the names of tensors, in the order of the model; `specs` are the whole
    parameters. `config` is config.json, None where nobody says it; an adapter has files of other
    names. `notes` say what the class computes a little otherwise."""

    shares: Mapping[str, TensorPart]
    specs: Mapping[str, ParamSpec]
    config: Mapping[str, Any] | None = None
    family: str = ""
    weights_file: str = WEIGHTS_FILE
    config_file: str = CONFIG_FILE
    notes: Sequence[str] = ()
    is_complete: bool = True  # whether nothing of the class, or of what was trained, is missing
    float32: Collection[str] = ()  # parameters that the class keeps so

    def of_params(self, names: Mapping[str, str]) -> "Twin":
        """The same tensors of parameters that have other names, by those that they have here."""
        specs = {names[name]: replace(spec, name=names[name]) for name, spec in self.specs.items()}
        shares = {
            name: replace(share, param=names[share.param]) for name, share in self.shares.items()
        }
        float32 = [names[name] for name in self.float32]
        return replace(self, shares=shares, specs=specs, float32=float32)

    @property
    def is_adapter(self) -> bool:
        return self.weights_file == ADAPTER_FILE

    @property
    def told(self) -> CallerModel:
        """What a reader of the folder has to know, where it is of a family or an adapter."""
        return CallerModel(specs=self.specs, shares=self.shares)


def twin_of(
    manifest: Manifest, config: Mapping[str, Any] | None, family: str, dtype: str, file: str
) -> Twin:
    """The twin of a checkpoint, for an export in `dtype`. `config` is what `config_for` reads,
    `family` the name of one (else the checkpoint's).

    Raises UnsupportedError for what Hugging Face's class can't represent, ModelMismatchError that
    lists every parameter which is not the model's, UsageError where nobody says what the model is.
    """
    manifest = with_model(manifest)
    name = family or manifest.family
    if not name:
        known = class_of(config, manifest.by_name)
        manifest, wrapped = _unwrapped(manifest, known)
        adapter = adapter_of(manifest, file)
        if adapter is not None:
            return _adapter(manifest, adapter, config, file).of_params(wrapped)
        return _plain(manifest, config, known, dtype, file).of_params(wrapped)
    found, twin = _family(name, file)
    sizes, architecture = _described(manifest, found, config, file)
    sizes = found.fitted(sizes, manifest.by_name)
    model = Model(found, sizes)
    _check_params(manifest, model, file, padded=config is None)
    whole = twin.whole_config(sizes, architecture, dtype)
    kept = whole if config is None else _in_dtype(config, dtype)
    shares, notes = twin.tensors(sizes), twin.notes(sizes, architecture)
    notes += [unsaid] if (unsaid := _unsaid(manifest)) else []
    _require_tensors(shares, model, file)
    return Twin(shares, _true(manifest, model), kept, name, notes=notes)


def _unwrapped(manifest: Manifest, known: ModelClass | None) -> tuple[Manifest, dict[str, str]]:
    """A manifest of parameters under the names that they have without wrappers, and their own names
    by those. Torch's wrappers are known; what one of the user's puts in front, the class says."""
    plain = {name: unwrapped_name(name) for name in manifest.by_name}
    if len({*plain.values()}) < len(plain):
        plain = {name: name for name in manifest.by_name}
    specs = {plain[spec.name]: spec for spec in manifest.params}
    prefix = known.prefix_in(specs) if known is not None else ""
    plain = {name: short.removeprefix(prefix) for name, short in plain.items()}
    ties = [
        Tie(plain.get(one.canonical, one.canonical), tuple(map(unwrapped_name, one.aliases)))
        for one in manifest.ties
    ]
    params = [replace(spec, name=plain[spec.name]) for spec in manifest.params]
    found = replace(manifest, params=tuple(params), ties=tuple(ties), buffers=(), names={})
    return found, {short: name for name, short in plain.items()}


def needs_family(manifest: Manifest) -> bool:
    """Whether a checkpoint has megatron-core's names, and says no family."""
    return not with_model(manifest).family and any(one in manifest.by_name for one in _OURS)


def pipe_names(family: str, config: str | Path | None) -> Mapping[str, str] | None:
    """Names in a pipeline of the model that a config says, of which a stock checkpoint says
    nothing; None where nobody says family and config. Raises as `config_at` and `twin_of`."""
    if not family or config is None:
        return None
    found, _ = _family(family, str(config))
    return Model(found, _read(found, config_at(config).tree, str(config))[0]).pipe or None


def read_twin(
    folder: Location, family: str = "", names: Collection[str] = ()
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


def told_by(folder: Location, like: Manifest) -> CallerModel:
    """What a reader of a Hugging Face folder has to know so that its parameters have the names of
    another checkpoint."""
    family = with_model(like).family
    if family:
        return read_twin(folder, family, like.by_name)[0].told
    return CallerModel(like=like, tensors=reader(lambda: config_in(folder), like))


def config_in(folder: Location) -> Mapping[str, Any]:
    """config.json of a folder; nothing where it has none. Raises DamagedFileError."""
    return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def check_config(folder: Location, model: Model, architecture: Architecture | None) -> None:
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
            fix="give the family `hugging_face` (see families/twin)",
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
        sizes = described_sizes(manifest.run, family.sizes)
        computes = described_architecture(manifest.run)
        if sizes is not None:
            _require_sizes(sizes)
        if computes is not None:
            _require_numbers(computes)
    except (TypeError, ValueError) as error:
        raise DamagedFileError(
            "what the manifest says of the model can't be read", file=file, found=str(error)[:200]
        ) from None
    said = None if config is None else _read(family, config, CONFIG_FILE)
    # attached without a family no sizes are recorded; and of some no architecture is known
    if said is not None and (faults := _differences(said, (sizes or said[0], computes))):
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
            found=_unsaid(manifest) or "none",
            fix="give --config (Python: config=) the config.json of the model",
            id="no-config",
        )
    return said or found  # type: ignore[return-value]


def _unsaid(manifest: Manifest) -> str:
    """Why a checkpoint that says its sizes does not say what its model computes."""
    record: Any = manifest.run.get(RECORDED)
    if not isinstance(record, dict) or OTHER_ANGLES not in record:
        return ""
    return (
        "Megatron-DeepSpeed, whose attention from December 2024 on (#441) takes the cosines of the "
        "rotary angles for the angles, unless Ulysses applies them in flash attention; before, "
        "under Ulysses, each rank counts positions from 0. No class of transformers computes "
        "either. A config is right where the program was mended"
    )


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


def _require_tensors(shares: Mapping[str, TensorPart], model: Model, file: str) -> None:
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


def _plain(
    manifest: Manifest,
    config: Mapping[str, Any] | None,
    known: ModelClass | None,
    dtype: str,
    file: str,
) -> Twin:
    """Of a model that transformers itself built, of the class `known`: names are what they are."""
    ours = next((one for one in _OURS if one in manifest.by_name), None)
    for part, what in _OF_NO_CLASS.items() if ours else ():
        if held := [name for name in manifest.by_name if part in name]:
            raise UnsupportedError(
                f"no class of transformers that is written here has {what}",
                file=file,
                parameter=some_of(held, 2),
                expected="a model without them",
                found=f"{len(held)} parameters of theirs",
                fix="load it into a GPTModel without them, save that, and export the save "
                '(Python: allow={"hybrid"} for the layers of a HybridModel)',
            )
    if ours and (unlike := _unlike_layers(manifest)):
        raise UnsupportedError(
            "no class of transformers that is written here has layers that differ",
            file=file,
            parameter=some_of(unlike, 2),
            expected="layers of one shape",
            found="several widths, or layers without attention",
            fix="ucp.fp32_state_dict(PATH) gives the weights under the model's own names",
        )
    if ours:
        raise UsageError(
            "the checkpoint holds a model of megatron-core, and does not say its family",
            file=file,
            parameter=ours,
            expected=", ".join(twins()),
            found="none",
            fix="give --config (Python: config=) the config.json of the model, or --family "
            "(family=) where that says none",
            id="no-config",
        )
    specs, shares = manifest.by_name, {name: TensorPart(name) for name in manifest.by_name}
    if config is None:
        return Twin(shares, specs)
    check_given(config, specs, file)
    tree, notes = with_tie(_in_dtype(config, dtype), manifest)
    if notes:
        known = class_of(tree, specs)  # it is read as it is written
    drawn = known.drawn(specs) if known is not None else []
    others = known.others(specs) if known is not None and not drawn else []
    names = released_names(config, {n: spec for n, spec in specs.items() if n not in others})
    notes += names_note(names, config.get("model_type"))
    if names is not None:
        shares = {**names.shares, **{name: shares[name] for name in others}}
    if known is None:
        return Twin(shares, specs, tree, notes=notes)
    if others:
        notes.append(
            f"{known.title} has no place for {len(others)} tensors of a module around it, which "
            f"keep their names, and which from_pretrained leaves out: {some_of(others)}"
        )
    if drawn:
        notes.append(
            f"{len(drawn)} tensors of {known.title} have no tensor of their name here, and "
            f"from_pretrained draws them at random: {some_of(drawn)}. Give the config of the class "
            "that was trained (--config; Python: config=), or unwrap the model"
        )
    float32 = known.in_float32(specs)
    return Twin(shares, specs, tree, notes=notes, is_complete=not drawn, float32=float32)


def _unlike_layers(manifest: Manifest) -> list[str]:
    """What megatron-core's heterogeneous layers have otherwise than each other: parameters that
    have several shapes, and those of attention that some layers lack."""
    held = grouped(
        (name.partition(f".{layer}.")[2], spec.shape)
        for name, spec in manifest.by_name.items()
        if (layer := number_of_layer(name)) is not None
    )
    most = max(map(len, held.values()), default=0)
    return [
        rest
        for rest, shapes in held.items()
        if len({*shapes}) > 1 or (rest.startswith("self_attention.") and len(shapes) < most)
    ]


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
            f"peft's files have no place: {some_of(left)}. ucp.fp32_state_dict(PATH) has all that "
            "was trained, for load_state_dict(strict=False) of the wrapped model"
        )
    if adapter.tables:
        notes.append(
            f"without {some_of(adapter.tables)}: frozen, and left out of the save. peft writes it "
            "too, and does not need it"
        )
    shares = {name: TensorPart(param) for param, name in files.items()}
    specs = {param: manifest.by_name[param] for param in files}
    return Twin(
        shares,
        specs,
        config,
        weights_file=ADAPTER_FILE,
        config_file=ADAPTER_CONFIG_FILE,
        notes=notes,
        is_complete=not left,
    )
