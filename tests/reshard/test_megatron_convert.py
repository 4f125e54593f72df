"""Megatron's folders converted to DeepSpeed's files and back: states, steps, hyper-parameters,
scheduler and counters are equal bit by bit, and torch's own reader reads what was written."""

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.names import Keeper
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Model
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.output_folder import prune
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import files as file_source
from megatron_ucp.reshard import folder as folder_sink
from megatron_ucp.reshard.check import diff, read_state, verify
from megatron_ucp.reshard.convert import convert
from megatron_ucp.reshard.hugging_face.export import export_hf
from megatron_ucp.reshard.look import newest_whole
from tests.formats.megatron_files import (
    GOLDEN,
    TAG,
    by_torch,
    changed_arguments,
    copied,
    rewritten,
    split,
    swapped_chunks,
)
from tests.reshard import paper, twins
from tests.reshard.plain import edited

# one model of four layers; the others are there for their random states (test_megatron_random)
CASES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir() and not p.name.startswith("rng_"))
MIXTURE = "td_full_moe_ep2"


def mesh_of(case: str) -> ucp.Mesh | None:
    return ucp.Mesh(dp=2, ep=2) if case == MIXTURE else None


@pytest.mark.parametrize("case", CASES)
def test_to_torch_dist_and_through_deepspeed_back(case: str, tmp_path: Path) -> None:
    one, native, two = tmp_path / TAG, tmp_path / "native" / "tag", tmp_path / "back" / TAG
    found = convert(GOLDEN / case, one, to="torch_dist", target=mesh_of(case), latest=True)
    assert found.notes == () and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    convert(one, native, target=ucp.Mesh(tp=2, dp=2, zero=1), latest=True)
    convert(native.parent, two, to="torch_dist", target=mesh_of(case))
    for other in (one, native, two):
        assert diff(GOLDEN / case, other) == [], other
        assert verify(other, deep=True).findings == ()


def test_extra_states_and_client_state_have_no_place_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(GOLDEN / CASES[0], tmp_path / "native" / "tag", target=ucp.Mesh(dp=1, zero=1))
    kept = {"decoder._extra_state": {"count": 3}}
    read = NativeCheckpoint.read_extras
    mine = {"mine": 1, "args": {}}
    monkeypatch.setattr(
        NativeCheckpoint,
        "read_extras",
        lambda own: replace(read(own), modules=kept, client_state=mine),
    )
    modules, client = convert(tmp_path / "native" / "tag", tmp_path / TAG, to="torch_dist").notes
    assert modules == "left out: extra states of modules: decoder._extra_state"
    assert client == "left out: client state: 'mine'"


def test_to_a_universal_folder(tmp_path: Path) -> None:
    for case in ("td_dpr_dp2_bf16", MIXTURE):
        convert(GOLDEN / case, tmp_path / case / "universal", to="universal")
        assert diff(GOLDEN / case, tmp_path / case / "universal") == []


@pytest.mark.parametrize("case", ["td_dpr_pp2vpp2", MIXTURE])
def test_torchs_own_reader_reads_the_same_bytes(case: str, tmp_path: Path) -> None:
    """And it reads the same of every tensor that stock Megatron wrote under names."""
    folder = tmp_path / TAG
    convert(GOLDEN / case, folder, to="torch_dist", target=mesh_of(case))
    found = by_torch(folder)
    stock = {k: v for k, v in by_torch(GOLDEN / case / TAG).items() if "optimizer.dist" not in k}
    assert stock.items() and {*stock} <= {*found}
    for key, values in stock.items():
        assert found[key].dtype == values.dtype and torch.equal(found[key], values), key
    with open_checkpoint(folder) as checkpoint:
        for name, state, values in split(found):
            if state != "weight":
                assert torch.equal(read_state(checkpoint, name, state), values.reshape(-1)), name


def test_what_stock_asks_for_besides_tensors(tmp_path: Path) -> None:
    """Every key of stock's own folder is there, and its `common.pt` loads as Megatron loads it."""
    from torch.distributed.checkpoint import FileSystemReader

    for case in ("td_full_tp2dp2", MIXTURE):
        folder = tmp_path / case / TAG
        convert(GOLDEN / case, folder, to="torch_dist", target=mesh_of(case))
        keys = [
            set(FileSystemReader(path).read_metadata().state_dict_metadata)
            for path in (GOLDEN / case / TAG, folder)
        ]
        assert keys[0] <= keys[1], sorted(keys[0] - keys[1])
        ours, stock = (_common(path) for path in (folder, GOLDEN / case / TAG))
        assert {*stock} <= {*ours}
        assert ours["optimizer"].keys() == stock["optimizer"].keys()
        assert ours["iteration"] == 3 and ours["args"].num_attention_heads == 4
        assert ours["args"].consumed_train_samples == 12 and ours["args"].no_save_rng
        assert [_identity(group) for group in _groups(ours)] == [
            _identity(group) for group in _groups(stock)
        ]
        for one, other in zip(_groups(ours), _groups(stock), strict=True):
            assert {key: one[key] for key in other} == other


def _common(folder: Path) -> Any:
    return torch.load(folder / "common.pt", weights_only=False)


def _groups(common: Any) -> list[dict[str, Any]]:
    tree = common["optimizer"]
    trees = [tree[0], tree[1]] if 0 in tree else [tree]
    return [group for one in trees for group in one["optimizer"]["param_groups"]]


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return tuple(group[key] for key in keys)


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """The control of all comparisons above: two layers' moments that change places."""
    tag = copied("td_full_tp2dp2", tmp_path / "changed")
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    swapped_chunks(tag, (key, (1, 0, 0)), (key, (2, 0, 0)))  # type: ignore[arg-type]
    found = diff(GOLDEN / "td_full_tp2dp2", tag)
    assert {one.parameter.split(".")[2] for one in found} == {"1", "2"}
    assert all(one.what.startswith("exp_avg,") for one in found)


def test_the_written_folder_is_the_same_from_every_source(tmp_path: Path) -> None:
    """Tensors and index depend on the state alone, not on the mesh that holds it."""
    native = tmp_path / "native" / "tag"
    convert(GOLDEN / "td_full_tp2dp2", native, target=ucp.Mesh(dp=2, zero=3))
    for at, source in enumerate((GOLDEN / "td_full_tp2dp2", native)):
        convert(source, tmp_path / str(at) / TAG, to="torch_dist")
    one, two = (by_torch(tmp_path / str(at) / TAG) for at in range(2))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_the_written_folder_is_the_same_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of cores."""
    found: list[dict[str, bytes]] = []
    for threads in (1, 5):
        for module in (file_source, folder_sink):
            monkeypatch.setattr(module, "THREADS", threads, raising=False)
        out = tmp_path / str(threads) / TAG
        convert(GOLDEN / "td_full_tp2dp2", out, to="torch_dist")
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1] and len(found[0]) > 3


def test_experts_optimizer_follows_the_mesh(tmp_path: Path) -> None:
    """With and without expert parallelism `common.pt` has another form; either becomes the
    other."""
    one, two = (tmp_path / name / TAG for name in ("one", "two"))
    convert(GOLDEN / MIXTURE, one, to="torch_dist")
    convert(one, two, to="torch_dist", target=mesh_of(MIXTURE))
    forms = [_common(tmp_path / name / TAG)["optimizer"].keys() for name in ("one", "two")]
    assert 0 not in forms[0] and {*forms[1]} == {0, 1}
    assert diff(GOLDEN / MIXTURE, one) == diff(GOLDEN / MIXTURE, two) == []


def test_a_folder_written_here_gives_deepspeed_the_same_keys(tmp_path: Path) -> None:
    """It holds extra states of Transformer Engine's modules too, which stock DeepSpeed's load into
    a model without them would call unexpected."""
    for case in ("td_full_tp2dp2", MIXTURE):
        one = tmp_path / case / TAG
        convert(GOLDEN / case, one, to="torch_dist", target=mesh_of(case))
        keys: list[set[str]] = []
        for number, source in enumerate((GOLDEN / case, one)):
            tag = tmp_path / case / str(number)
            convert(source, tag, target=ucp.Mesh(dp=2, zero=1))
            file = tag / "mp_rank_00_model_states.pt"
            keys.append({*torch.load(file, weights_only=False)["module"]})
        assert keys[0] == keys[1] and any(key.endswith("fc2._extra_state") for key in keys[0])


@pytest.mark.parametrize("state", ["", "optimizer.state.exp_avg."])
def test_a_norm_that_differs_under_its_two_keys(state: str, tmp_path: Path) -> None:
    convert(GOLDEN / MIXTURE, tmp_path / TAG, to="torch_dist", target=mesh_of(MIXTURE))
    assert diff(GOLDEN / MIXTURE, tmp_path / TAG) == []
    key = f"{state}decoder.layers.pre_mlp_layernorm.weight"
    swapped_chunks(tmp_path / TAG, (key, (1, 0)), (key, (2, 0)))  # type: ignore[arg-type]
    with pytest.raises(errors.ForeignFileError, match="under two keys, and they differ"):
        convert(tmp_path / TAG, tmp_path / "native", target=ucp.Mesh(zero=1))


@pytest.mark.parametrize("said", ["nothing", "another name for a gate"])
def test_gate_and_up_are_cut_apart_whatever_the_arguments_say(said: str, tmp_path: Path) -> None:
    """Folders of programs other than Megatron-LM have no arguments."""
    tag = copied("td_full_tp2dp2", tmp_path / "source")
    if said == "nothing":
        rewritten(tag / "common.pt", lambda tree: tree.pop("args"))
    else:
        changed_arguments(tag, swiglu=False, quick_geglu=True)
    convert(tag, tmp_path / "tag", target=ucp.Mesh(tp=2, zero=1))
    (whole,) = [v for k, v in by_torch(tag).items() if k == "decoder.layers.mlp.linear_fc1.weight"]
    gate, up = whole[1].chunk(2)
    for rank in range(2):
        file = tmp_path / "tag" / f"mp_rank_0{rank}_model_states.pt"
        found = torch.load(file, weights_only=False)["module"]
        own = torch.cat([half.chunk(2)[rank] for half in (gate, up)])
        assert torch.equal(found["decoder.layers.1.mlp.linear_fc1.weight"], own)
        assert not torch.equal(own, whole[1].chunk(2)[rank])


def test_what_one_rank_held_says_nothing_of_how_several_cut_it(tmp_path: Path) -> None:
    """Of a parameter that Megatron's table of names does not have."""
    tag = _of_one_rank(tmp_path / "source" / TAG)
    convert(tag, tmp_path / "whole", target=ucp.Mesh(dp=2, zero=1))
    assert diff(tag, tmp_path / "whole") == []
    for number, mesh in enumerate((ucp.Mesh(tp=2), ucp.Mesh(tp=1, etp=2, dp=2))):
        with pytest.raises(errors.RuleError, match="nobody declared how a parameter is cut"):
            convert(tag, tmp_path / str(number), target=replace(mesh, zero=1))


def _of_one_rank(tag: Path) -> Path:
    """Megatron-LM's older files of a model with three parameters, one of multi-latent
    attention."""
    weights = {
        "embedding.word_embeddings.weight": torch.randn(64, 8),
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": torch.randn(8, 8),
        "decoder.final_layernorm.weight": torch.randn(64),
    }
    flat = torch.cat([weight.reshape(-1) for weight in reversed(weights.values())])
    states = {"param": flat, "exp_avg": flat * 2, "exp_avg_sq": flat**2}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "step": 3.0}
    group |= {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    said = Namespace(num_layers=1, use_distributed_optimizer=True, data_parallel_size=1)
    folder = tag / "mp_rank_00"
    folder.mkdir(parents=True)
    model = {"args": said, "iteration": 3, "model": weights}
    optimizer = {"optimizer": {"param_groups": [group]}}
    torch.save(model | {"optimizer": optimizer}, folder / "model_optim_rng.pt")
    buffer = {(torch.float32, torch.float32): {**states, "numel_unpadded": flat.numel()}}
    torch.save({"buckets_coalesced": True, 0: buffer}, folder / "distrib_optim.pt")
    return tag


def test_newest_and_weights_alone_of_a_damaged_folder(tmp_path: Path) -> None:
    tag = copied("td_full_tp2dp2", tmp_path / "run")
    assert newest_whole(tmp_path / "run").folder == tag
    key = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
    swapped_chunks(tag, (key, (1, 0, 0)), (key, (2, 0, 0)))  # type: ignore[arg-type]
    with pytest.raises(errors.StateMismatchError, match="--allow weights"):
        export_hf(tag, tmp_path / "hf")
    export_hf(GOLDEN / "td_full_tp2dp2", tmp_path / "good")
    found = export_hf(tag, tmp_path / "hf", allow={"weights"})
    assert "weights alone: no states of an optimizer" in found.notes
    assert diff(tmp_path / "good", tmp_path / "hf") == []
    shutil.copytree(GOLDEN / "td_full_tp2dp2" / TAG, tmp_path / "run" / "iter_0000002")
    newest = newest_whole(tmp_path / "run")
    assert newest.folder.name == "iter_0000002" and "iter_0000003" in newest.passed_over[0]


def test_refused(tmp_path: Path) -> None:
    case = GOLDEN / "td_full_tp2dp2"
    with pytest.raises(errors.UsageError, match="the output exists"):
        convert(case, case / TAG, to="torch_dist")
    with pytest.raises(errors.UsageError, match="no such format"):
        convert(case, tmp_path / "x", to="zarr")
    with pytest.raises(errors.UsageError, match="the model has no experts"):
        convert(case, tmp_path / TAG, to="torch_dist", target=ucp.Mesh(ep=2, dp=2))
    with pytest.raises(errors.LayoutError, match="does not divide the experts"):
        convert(GOLDEN / MIXTURE, tmp_path / TAG, to="torch_dist", target=ucp.Mesh(ep=3, dp=3))
    found = convert(case, tmp_path / "odd_name", to="torch_dist")
    assert "Megatron-LM looks for folders such as iter_0000003" in found.pointer
    with pytest.raises(errors.UsageError, match="can't name this folder"):
        convert(case, tmp_path / "odd", to="torch_dist", latest=True)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


def test_the_family_follows_from_the_arguments() -> None:
    from megatron_ucp.families.arguments import with_model

    found: dict[str, Manifest] = {}
    for case in CASES:
        with open_checkpoint(GOLDEN / case) as checkpoint:
            found[case] = with_model(checkpoint.manifest)
    assert {case: one.family for case, one in found.items()} == {
        case: "mixtral" if case == MIXTURE else "llama" for case in CASES
    }
    for one in found.values():
        sizes = one.run["model"]["sizes"]
        assert (sizes["layers"], sizes["heads"], sizes["groups"], sizes["vocab"]) == (4, 4, 2, 64)
        model = Model(find_family(one.family), find_family(one.family).sizes(**sizes))
        cuts = {spec.name: spec.without_chunks().layout for spec in one.params}
        assert {name: row.layout for name, row in model.table.items()} == cuts


def test_without_moments_there_is_nothing_that_megatron_would_load(tmp_path: Path) -> None:
    export_hf(GOLDEN / "td_full_tp2dp2", tmp_path / "hf")
    with pytest.raises(errors.StateMismatchError, match="holds no optimizer"):
        convert(tmp_path / "hf", tmp_path / TAG, to="torch_dist")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.weight", "transformer.wte.weight", "decoder.layers.0.mlp.w"],
)
def test_names_of_transformers_are_no_names_of_megatrons(name: str, tmp_path: Path) -> None:
    source = paper.write(paper.plain_model({name: (4, 3)}, "float32"), tmp_path / "a" / "step7")
    if name.startswith("decoder"):
        convert(source, tmp_path / TAG, to="torch_dist")
        return
    with pytest.raises(errors.UnsupportedError, match="other names than a class of transformers"):
        convert(source, tmp_path / TAG, to="torch_dist")
    assert not (tmp_path / TAG).exists()


# what no tensor's shape shows: family, settings
COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "tanh": ("gpt", {"activation": "gelu_tanh"}),
    "scaled": ("llama", {"rope_factor": 8.0}),
    "interpolated": ("llama", {"interpolation": 2.0, "norm_epsilon": 1e-6}),
    "mistral": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "experts": ("mixtral", {"topk": 3}),
    "odd": ("llama", {"odd": {"rotary_percent": 0.5}}),
    "another activation": ("llama", {"activation": "gelu"}),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_a_folder_for_megatron_says_what_the_model_computes(what: str, tmp_path: Path) -> None:
    """An export of it is that of its source, to the byte: config, true vocabulary, refusals."""
    family, settings = COMPUTED[what]
    source = paper.write(twins.model(family, **settings), tmp_path / "source" / "tag")
    convert(source, tmp_path / "megatron" / TAG, to="torch_dist")
    found: list[object] = []
    for number, folder in enumerate((source, tmp_path / "megatron" / TAG)):
        out = tmp_path / f"hf{number}"
        try:
            export_hf(folder, out)
        except errors.UnsupportedError as error:
            found.append(error.found)
            continue
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1] and found[0]
    assert isinstance(found[0], str) == (what in ("odd", "another activation"))


def test_weights_of_experts_that_hugging_face_has_not(tmp_path: Path) -> None:
    """Sinkhorn takes softmax before the choice; ways to balance by a loss compute the same."""
    for number, (said, error) in enumerate(
        [
            ("sinkhorn", errors.UnsupportedError),
            ("none", None),
            (["aux_loss", "seq_aux_loss"], None),
        ]
    ):
        tag = copied(MIXTURE, tmp_path / str(number))
        changed_arguments(tag, moe_router_load_balancing_type=said)
        if error is None:
            export_hf(tag, tmp_path / f"hf{number}")
            continue
        with pytest.raises(error, match="moe_router_load_balancing_type=sinkhorn"):
            export_hf(tag, tmp_path / f"hf{number}")


def test_a_vocabulary_of_which_the_arguments_say_the_padding_alone(tmp_path: Path) -> None:
    """A tokenizer of files knows how many tokens there are: a note, unless a config says it."""
    tag = copied("td_full_tp2dp2", tmp_path / "run")
    assert export_hf(tag, tmp_path / "known").notes == ()
    changed_arguments(tag, tokenizer_type="GPT2BPETokenizer", vocab_size=None)
    (note,) = export_hf(tag, tmp_path / "all").notes
    assert "all 64 rows of the vocabulary were written" in note and "--config DIR" in note
    for number, said in enumerate((0, True, 2.5, "many", [63])):
        changed_arguments(tag, vocab_size=said)
        assert export_hf(tag, tmp_path / str(number)).notes == (note,)
    known = {"family": "llama", "config": tmp_path / "known"}
    assert export_hf(tag, tmp_path / "again", **known).notes == ()
    assert diff(tmp_path / "known", tmp_path / "again") == []
    changed_arguments(tag, vocab_size=50, padded_vocab_size=60)  # no row is left out unseen
    with pytest.raises(errors.ModelMismatchError, match=r"\[64, 32\] instead of \[60, 32\]"):
        export_hf(tag, tmp_path / "fewer")


def test_experts_of_a_universal_folder_are_spread(tmp_path: Path) -> None:
    """Their number is that of the names."""
    universal = tmp_path / "universal" / "tag"
    convert(GOLDEN / MIXTURE, universal, to="universal")
    target = ucp.Mesh(ep=2, dp=2, zero=1)
    for number, manifest in enumerate((True, False)):
        if not manifest:
            (universal / "ucp_manifest.json").unlink()
        out = tmp_path / str(number) / "tag"
        convert(universal, out, target=target)
        assert diff(GOLDEN / MIXTURE, out) == []
        assert len([*out.glob("layer_0_expert_*")]) == 4
    with pytest.raises(errors.LayoutError, match="does not divide the experts"):
        convert(universal, tmp_path / "x" / "tag", target=ucp.Mesh(ep=3, dp=3, zero=1))


@pytest.mark.parametrize("to", ["native", "universal"])
def test_the_mesh_that_wrote_a_torch_dist_folder_is_said(to: str, tmp_path: Path) -> None:
    """Its files don't depend on the mesh, and its arguments say which one it was."""
    case, mesh = GOLDEN / "td_full_tp2dp2", "tp=2,pp=1,dp=2,zero=0"
    found = ucp.convert(case, tmp_path / to, to=to, mesh="dp=1,zero=1" if to == "native" else None)
    assert found.source_mesh == mesh
    manifest = ucp.describe(tmp_path / to)
    assert manifest.run["converted_from"] == mesh and "saved_on" not in manifest.run
    assert manifest.written_on == manifest.mesh


@pytest.mark.parametrize("said", ["tp=2,pp=1,dp=2,zero=0", "tp=many", 5, None])
def test_what_a_manifest_says_of_the_mesh_that_wrote_it(said: object) -> None:
    one = Manifest(Keeper.TORCH_DIST, ucp.Mesh(), (), (), run={"saved_on": said})
    assert one.written_on == (ucp.Mesh(tp=2, dp=2) if str(said)[-1] == "0" else ucp.Mesh())
    many = Manifest(Keeper.PAPER, ucp.Mesh(dp=2, zero=1), (), (), run={"saved_on": said})
    assert many.written_on == many.mesh


@pytest.mark.parametrize("good", [0, 2, 3, 4, 5, 6, 7, 8])
def test_the_clock_of_a_loss_scale(good: int, tmp_path: Path) -> None:
    """Good steps since DeepSpeed's own scaler last changed its scale, of which three make it grow;
    no more than Megatron's counter can have."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**8, 3, 1.0, 1, False)
    scaler.cur_iter, scaler.last_overflow_iter = 2, 1  # a good step, and a bad one
    since, scales = 0, [scaler.cur_scale]
    for _ in range(good):
        scaler.update_scale(False)
        scales.append(scaler.cur_scale)
        since = since + 1 if scales[-1] == scales[-2] else 0

    def change(name: str, tree: dict[str, Any]) -> None:
        if "optim_states" in name:
            tree["optimizer_state_dict"]["loss_scaler"] = scaler

    source = paper.write(paper.plain_model({"a": (4, 3)}, "float16"), tmp_path / "a" / "step7")
    convert(edited(source, change), tmp_path / TAG, to="torch_dist")
    found = _common(tmp_path / TAG)["optimizer"]["grad_scaler"]
    assert float(found["scale"]) == scaler.cur_scale and found["growth_tracker"] == min(since, 2)


SAID = {"seed": 41, "run_id": "a" * 32, "data": {"epoch": 2}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder for Megatron, of a run with a manifest on another mesh."""
    model = twins.model("llama")
    source = paper.write(replace(model, run=model.run | SAID), tmp_path / "a" / "step7")
    convert(source, tmp_path / "cut" / "tag", target=ucp.Mesh(tp=2, dp=2, zero=1))
    convert(tmp_path / "cut" / "tag", tmp_path / "one" / TAG, to="torch_dist")
    return tmp_path / "one" / TAG


def test_a_manifest_lies_beside_what_is_written(written: Path) -> None:
    """As beside every other output: what no file of Megatron's has a place for goes on."""
    with open_checkpoint(written) as checkpoint:
        recorded = checkpoint.recorded
        assert recorded is not None and checkpoint.extras.data_position == SAID["data"]
        assert checkpoint.manifest.written_on == recorded.written_on
    assert {key: recorded.run[key] for key in SAID} == SAID
    assert (recorded.written_on.tp, recorded.written_on.dp) == (2, 2)
    assert recorded.run["global_steps"] == 7 and recorded.run["moved_latest"] is False
    assert recorded.run["converted_from"].startswith("tp=2,pp=1,dp=2")
    assert prune(written.parent, keep=1) == [] and written.is_dir()


def test_the_manifest_comes_from_the_source(written: Path, tmp_path: Path) -> None:
    """Whoever converts it again gets the same bytes; it is read, and goes on."""
    convert(tmp_path / "cut" / "tag", tmp_path / "two" / TAG, to="torch_dist")
    outs = (written, tmp_path / "two" / TAG)
    files = [{path.name: path.read_bytes() for path in out.iterdir()} for out in outs]
    assert files[0] == files[1] and FILE_NAME in files[0]
    back = tmp_path / "back" / "tag"
    convert(written, back, target=ucp.Mesh(dp=2, zero=1))
    assert ucp.describe(back).run["seed"] == SAID["seed"]
    for out in (written, back):
        assert diff(outs[1], out) == [] and verify(out, deep=True).findings == ()
    (written / "__3_0.distcp").unlink()
    assert verify(written).findings


def test_the_mesh_of_a_model_that_megatron_has_no_arguments_for(tmp_path: Path) -> None:
    source = paper.write(paper.plain_model({"a": (4, 3), "b": (5,)}), tmp_path / "a" / "step7")
    convert(source, tmp_path / "cut", target=ucp.Mesh(dp=3, zero=1))
    convert(tmp_path / "cut", tmp_path / TAG, to="torch_dist")
    assert ucp.describe(tmp_path / TAG).written_on.dp == 3
