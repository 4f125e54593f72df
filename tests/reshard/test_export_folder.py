"""What lies beside the weights of an export: the files of the model's own folder, copied or named;
and config.json, of which the flag of tied weights says what the tensors are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.reshard.hugging_face import export
from megatron_ucp.reshard.hugging_face.names import is_tied, with_tie
from tests.reshard import paper
from tests.reshard.plain import SHAPES

COPIED = [
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja", "vocab.txt", "spiece.model", "tokenizer.json"),
    *("sentencepiece.bpe.model", "tekken.json", "README.md", "LICENSE", "qwen.tiktoken"),
    "additional_chat_templates/tool_use.jinja",
]
WEIGHTS_OR_TRAINING = [
    *("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("trainer_state.json", "training_args.bin", "rng_state_0.pth", "scheduler.pt", "latest"),
    *("zero_to_fp32.py", "adapter_config.json", "model.gguf", "ucp_export.json", ".gitattributes"),
    *("global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt", "checkpoint-4/tokenizer.json"),
]
NAMED = ["private.key", "tower.dat", "runs/events", "train.py"]


def folder_with(folder: Path, names: list[str], **config: Any) -> Path:
    """A model's folder with these files, each with bytes of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the bytes of {name}")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", **config}))
    return folder


def exported(tmp_path: Path, **options: Any) -> tuple[set[str], str]:
    """The names of the files of an export, and its notes."""
    source = paper.write(paper.plain_model(SHAPES, "bfloat16"), tmp_path / "source" / "step7")
    done = ucp.export_hf(source, tmp_path / "out", verify=True, **options)
    out = tmp_path / "out"
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    return names - {"config.json", "model.safetensors", "ucp_export.json"}, "\n".join(done.notes)


def test_every_file_is_copied_or_named(tmp_path: Path) -> None:
    """Byte by byte; what holds weights or a training is neither."""
    config = folder_with(tmp_path / "model", [*COPIED, *WEIGHTS_OR_TRAINING, *NAMED])
    names, notes = exported(tmp_path, config=config)
    assert names == {*COPIED}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (config / name).read_bytes()
    (line,) = [line for line in notes.splitlines() if "not copied" in line]
    said = {one.split(" ")[0].rstrip("/") for one in line.removeprefix("not copied: ").split(", ")}
    assert said == {"private.key", "runs", "tower.dat", "train.py"}
    # and it may be replaced, as the list of what was written has the folder's file too
    ucp.export_hf(tmp_path / "source" / "step7", tmp_path / "out", config=config, force=True)


def test_code_of_the_model_is_copied_with_its_config(tmp_path: Path) -> None:
    auto = {"AutoConfig": "own.Config", "AutoTokenizer": ["words.Slow", None]}
    code = ["own.py", "words.py", "used_by_own.py"]
    config = folder_with(tmp_path / "model", code, auto_map=auto)
    names, notes = exported(tmp_path, config=config)
    assert names == {*code} and "auto_map" not in notes


def test_code_that_is_not_there_is_named(tmp_path: Path) -> None:
    auto = {"AutoConfig": "own.Config", "AutoModel": "somebody/model--far.Model"}
    config = folder_with(tmp_path / "model", [], auto_map=auto)
    names, notes = exported(tmp_path, config=config)
    assert names == set() and "auto_map of config.json names own.py, which the export" in notes


def test_links_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to what is no part of the model is never followed; those of the Hub's cache are."""
    monkeypatch.setattr(export, "MOST_BYTES", 1000)
    hub = tmp_path / "models--a--b"
    model = folder_with(hub / "snapshots" / "1f", ["vocab.json"])
    folder_with(hub / "blobs", ["f00d"])
    (tmp_path / "secret.json").write_text("{}")
    (model / "tokenizer.json").symlink_to(Path("../../blobs/f00d"))
    (model / "merges.txt").symlink_to(tmp_path / "secret.json")
    (model / "added_tokens.json").symlink_to(model / "nothing")
    (model / "special_tokens_map.json").write_text("x" * 1001)
    names, notes = exported(tmp_path, config=model)
    assert names == {"vocab.json", "tokenizer.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "the bytes of f00d"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    for said in (
        "merges.txt (a link that leads out of the folder)",
        "added_tokens.json (no regular file)",
        "special_tokens_map.json (larger than 0 MiB)",
    ):
        assert said in notes


def test_a_tokenizer_of_another_folder_is_not_mixed_with_the_models(tmp_path: Path) -> None:
    model = folder_with(tmp_path / "model", ["tokenizer.json", "processor_config.json"])
    words = folder_with(tmp_path / "words", ["spiece.model", "tokenizer_config.json"])
    names, _ = exported(tmp_path, config=model, tokenizer=words)
    assert names == {"spiece.model", "tokenizer_config.json", "processor_config.json"}


# ------------------------------------------------ the flag of tied weights

TABLES = {
    "lm_head.weight": "model.embed_tokens.weight",
    "embed_out.weight": "gpt_neox.embed_in.weight",
    "model.lm_head.weight": "transformer.wte.weight",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "decoder.output_projection.weight": "shared.weight",
}


def model_of(head: str, table: str, tied: bool) -> Manifest:
    names = [table, "model.norm.weight", *([] if tied else [head])]
    specs = tuple(ParamSpec(name, (8, 4), "float32", "trainable") for name in names)
    ties = (Tie(table, (head,)),) if tied else ()
    return Manifest(Keeper.ZERO_3, Mesh(), specs, (), ties=ties)


@pytest.mark.parametrize(("head", "table"), TABLES.items())
@pytest.mark.parametrize("tied", [True, False])
def test_the_flag_is_what_the_tensors_are(head: str, table: str, tied: bool) -> None:
    found = model_of(head, table, tied)
    assert is_tied(found) is tied
    flag = "tie_word_embeddings"
    for said in (True, False, None):
        config = {} if said is None else {flag: said}
        changed, notes = with_tie(config, found)
        assert changed == {flag: tied}
        assert bool(notes) is (said is not None and said is not tied)
    inner = {"text_config": {"vocab_size": 8}, "vision_config": {flag: not tied}}
    changed, notes = with_tie({**inner, flag: tied}, found)
    assert changed["text_config"][flag] is tied and notes == []
    assert changed["vision_config"] == inner["vision_config"]  # of another table
    inner["text_config"][flag] = not tied
    changed, notes = with_tie({**inner, flag: tied}, found)
    assert changed["text_config"][flag] is tied and "text_config.tie_word_embeddings" in notes[0]


def test_a_model_without_a_head_says_nothing() -> None:
    found = model_of("lm_head.weight", "model.embed_tokens.weight", True)
    assert with_tie({"tie_word_embeddings": False}, replace(found, ties=())) == (
        {"tie_word_embeddings": False},
        [],
    )


def test_two_tensors_under_a_flag_that_ties_them(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (6, 4), "lm_head.weight": (6, 4), "gain": (1,)}
    source = paper.write(paper.plain_model(shapes), tmp_path / "source" / "step7")
    config = folder_with(tmp_path / "model", [], tie_word_embeddings=True, vocab_size=6)
    done = ucp.export_hf(source, tmp_path / "out", config=config, verify=True)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    assert any("the head and the table of tokens are two tensors" in note for note in done.notes)
