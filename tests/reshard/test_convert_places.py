"""Conversions into odd places, what happens meanwhile, and how stock's own converter cuts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.layout import Partial, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import InexactError, SaveError, UsageError
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.deepspeed import tp_patterns
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.reshard import folder as module
from tests.reshard import paper
from tests.reshard.plain import (
    PLAIN,
    SHAPES,
    converted,
    edited,
    family_model,
    stock_converted,
    target,
    whole,
    written,
)

# ------------------------------------------------ how stock's own converter cuts


def test_stocks_patterns_are_those_of_the_target(tmp_path: Path) -> None:
    """The source's are for its own mesh and names; without the right ones stock's converter cuts
    everything on dim 0."""
    kinds = {"biases": False, "norm_biases": False, "gated": True, "tied": True}
    model = family_model("llama", Sizes(2, 8, 4, 2, 2, 8, 12, 12, **kinds))
    stale = {"universal_checkpoint_version": 0.2, "affine_map": {"version": 1, "params": {}}}
    source = written(model, tmp_path, universal_checkpoint_info=stale)
    for pp in (1, 2):
        native, output = tmp_path / f"native{pp}", tmp_path / f"stock{pp}"
        stages = (2, 3) if pp == 2 else None
        to = Target(ucp.Mesh(tp=2, pp=pp, dp=2, zero=1), **PLAIN, stages=stages)
        ucp.convert(source, native, target=to)
        stock_converted(native, output)
        for name in model.shapes:
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                path = output / "zero" / paper.named(model, name, pp == 2) / f"{state}.pt"
                found = torch.load(path, weights_only=False)
                found = found["param"] if isinstance(found, dict) else found
                assert paper.same(found, model.truth(name, state)), (name, state)


def test_patterns_say_what_they_are_read_as() -> None:
    layouts = {
        "h.0.row.weight": Shard("tp", 1),
        "h.0.rows.weight": Shard("tp", 0),
        "h.1.halves": ShardNC("tp", 0, (4, 4)),
        "h.1.uneven": ShardNC("tp", 0, (8, 4, 4)),
        "norm": Replicate(),
        "mine": Partial("tp"),
        "h.1.row.weight": Shard("tp", 0),
    }
    specs = [
        ParamSpec(name, (16 if "uneven" in name else 8, 4), "float32", layout=layout)
        for name, layout in layouts.items()
    ]
    # the last one is cut in another way than the same one of another layer
    for chosen in (specs, specs[:-1]):
        info = tp_patterns.patterns_of(chosen, lambda name: name)
        for spec in chosen:
            local = spec.layout.local_shape(spec.name, spec.shape, {"tp": (2, 0)})
            found = tp_patterns.StockInfo(info, "file").declared(spec.name, local, 2)
            assert (found.shape, found.layout) == (spec.shape, spec.layout)
    deep = ParamSpec("deep", (2, 2, 2), "float32", layout=Shard("tp", 2))
    assert tp_patterns.patterns_of([deep], str) == {}


# ------------------------------------------------ places


def test_an_output_inside_of_a_checkpoint(source: Path, tmp_path: Path) -> None:
    """Its `latest` would lead every later load of that tag into it."""
    ucp.convert(source, tmp_path / "universal", to="universal")
    (tmp_path / "link").symlink_to(source)
    universal = tmp_path / "universal"
    for origin, place in (
        *((source, source / "out"), (source, source / "deep" / "out")),
        *((source, tmp_path / "link" / "out"), (source, universal / "out")),
        (universal, universal / "zero" / "out"),
    ):
        with pytest.raises(UsageError, match="inside of a checkpoint"):
            ucp.convert(origin, place, target=target())
    assert sorted(p.name for p in source.iterdir()) == [
        "mp_rank_00_model_states.pt",
        "ucp_manifest.json",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]
    with pytest.raises(UsageError, match="exists"):
        ucp.convert(source, source, target=target())


def test_relative_paths(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ucp.convert("source/step7/", "link/out/", target=target())
    ucp.convert("source/step7", "link/../other", target=target())
    assert paper.differences(tmp_path / "real" / "out", tmp_path / "other") == []
    assert not (tmp_path / "real" / "latest").exists() and not (tmp_path / "latest").exists()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists"):
        ucp.convert("source/step7", "dangling", target=target())


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
def test_an_output_with_the_name_of_a_pointer(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name of a pointer"):
        ucp.convert(source, tmp_path / name, target=target())
    assert not (tmp_path / name).exists()


def test_two_conversions_into_one_folder(model: paper.Model, source: Path, tmp_path: Path) -> None:
    aside = tmp_path / ".out.saving"
    with output_folder.held(aside):
        (aside / "file").touch()
        with pytest.raises(UsageError, match="another conversion"):
            ucp.convert(source, tmp_path / "out", target=target())
        assert (aside / "file").exists(), "the other one's files are gone"
    aside.mkdir()  # what a killed one has left
    converted(model, source, tmp_path / "out", target())
    assert not aside.exists()


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something that happens when all files are written."""
    original = module.sync_all

    def sync(folder: Path) -> None:
        original(folder)
        happens()

    monkeypatch.setattr(module, "sync_all", sync)


def test_a_save_takes_the_name_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mp_rank_00_model_states.pt").write_text("of a run")

    meanwhile(monkeypatch, save)
    with pytest.raises(UsageError, match="exists"):
        ucp.convert(source, tmp_path / "out", target=target())
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mp_rank_00_model_states.pt"]
    assert not (tmp_path / ".out.saving").exists()


@pytest.mark.parametrize("to", ["native", "universal"])
def test_the_folder_is_removed_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """As a run does that begins a save beside it."""
    jobs_of = module._jobs_of

    def removed(pieces: Any) -> Any:
        shutil.rmtree(tmp_path / ".out.saving", ignore_errors=True)
        return jobs_of(pieces)

    monkeypatch.setattr(module, "_jobs_of", removed)
    with pytest.raises(SaveError, match="could not be written"):
        ucp.convert(source, tmp_path / "out", to=to, target=target())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_no_pointer_moves_unasked(source: Path, tmp_path: Path) -> None:
    """One that is there stays; in a folder that is no run none is written; `latest=True` moves and
    writes; a run that has none gets its own."""
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    said = ucp.convert(source, tmp_path / "v1.2-rc.3", target=target()).pointer
    assert "`latest` still names" in said and "with the tag v1.2-rc.3" in said
    assert (tmp_path / "latest").read_bytes() == b"\xff\xfe"
    new = tmp_path / "new"
    for name, to in (("a", "native"), ("b", "native"), ("u", "universal")):
        said = ucp.convert(source, new / name, to=to, target=target()).pointer
        assert "was written: load it by its path" in said
    shutil.copytree(source, new / "copy")  # of a tag of another name
    assert "no `latest`" in ucp.convert(source, new / "c", target=target()).pointer
    assert not (new / "latest").exists() and not (new / "latest_universal").exists()
    assert "now names d" in ucp.convert(source, new / "d", target=target(), latest=True).pointer
    assert (new / "latest").read_text() == "d"


def test_a_run_without_a_pointer_gets_one(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    edited(shutil.copytree(source, run / "global_step7"), lambda name, tree: None)
    assert "now names a" in ucp.convert(source, run / "a", target=target()).pointer
    assert (run / "latest").read_text() == "a"
    ucp.convert(source, run / "b", target=target())
    assert (run / "latest").read_text() == "a"


def test_a_pointer_that_can_not_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "latest_universal").mkdir(parents=True)  # can't be replaced by a file
    found = ucp.convert(source, tmp_path / "other" / "out", to="universal", latest=True)
    assert "could not be written" in found.pointer
    assert ucp.diff(source, tmp_path / "other" / "out") == []


def test_the_kept_tags_of_a_run_do_not_count_a_conversion(source: Path, tmp_path: Path) -> None:
    """`latest` never named it: retention must not remove it."""
    path = source / "ucp_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["run"]["moved_latest"] = True
    path.write_text(json.dumps(manifest))
    ucp.convert(source, tmp_path / "out", target=target())
    assert ucp.describe(tmp_path / "out").run["moved_latest"] is False


def test_many_frozen_parameters_take_no_longer_each(tmp_path: Path) -> None:
    """An adapter on a large model: the place of each is looked up and not searched for."""
    from megatron_ucp.formats.deepspeed.writer import NativeWriter

    odd = {f"base.{number}.weight": (1,) for number in range(100)}
    model = paper.plain_model({**SHAPES, **odd}, kinds=dict.fromkeys(odd, "frozen"))
    source = written(model, tmp_path)
    values = NativeWriter._values
    with mock.patch.object(NativeWriter, "_values", autospec=True, side_effect=values) as called:
        ucp.convert(source, tmp_path / "out", target=target())
    assert 0 < called.call_count < 10
    whole(model, source, tmp_path / "out", target())


def test_a_rounded_frozen_parameter_needs_a_word(tmp_path: Path) -> None:
    model = paper.plain_model({**SHAPES, "table": (3,)}, kinds={"table": "frozen"})
    source = written(model, tmp_path)
    with pytest.raises(InexactError, match="would be rounded"):
        ucp.convert(source, tmp_path / "out", target=target(dtype="bfloat16"))
