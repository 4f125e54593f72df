"""Rule files for the models of the tests, and checkpoints without manifests to use them on."""

import shutil
from pathlib import Path

import megatron_ucp as ucp
from megatron_ucp.core.manifest import ParamSpec
from tests.engines.sources import Sources, without_manifest
from tests.engines.tensor_jobs import Mega

LLAMA = r"""
format = 1
[[rule]]
pattern = '(?:embedding\.word_embeddings|output_layer)\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\..*layernorm\.weight'
layout = "Replicate"
[[rule]]
pattern = 'decoder\.layers\.\d+\.self_attention\.linear_qkv\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.weight'
layout = "ShardHy"
along = [["tp", 1]]
[[rule]]
pattern = 'decoder\.layers\.\d+\.mlp\.linear_fc1\.weight'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = 2
"""
GPT = r"""
format = 1
[[rule]]
pattern = '(?:embedding\.word_embeddings|output_layer)\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'embedding\.position_embeddings\.weight|decoder\..*layernorm\.(?:weight|bias)'
layout = "Replicate"
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.(?:weight|bias)'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.weight'
layout = "Shard"
axis = "tp"
dim = 1
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.bias'
layout = "Replicate"
"""
RULES = {"llama": LLAMA, "gpt": GPT}
PIPELINE = r"""
[[pipeline]]
pattern = 'EMBEDDING\.(?P<rest>.+)'
name = 'embedding.{rest}'
[[pipeline]]
pattern = '(?P<position>[123])\.(?P<rest>.+)'
name = 'decoder.layers.{position-1}.{rest}'
[[pipeline]]
pattern = '4\.(?P<rest>.+)'
name = 'decoder.final_layernorm.{rest}'
[[pipeline]]
pattern = '5\.weight'
name = 'output_layer.weight'
"""


def stock(sources: Sources, setup: Mega, world: int = 2) -> Path:
    """As stock DeepSpeed writes it: no manifest, no patterns."""
    return Path(sources.get(world, setup, attach=False, more=0)) / "filled"


def whole(sources: Sources, family: str) -> Path:
    """The same states, saved with a manifest at tp=1."""
    return Path(sources.get(1, Mega(family, 1, 1), more=0)) / "filled"


def bare(folder: Path, tmp_path: Path) -> Path:
    """A copy without its manifest; stock's patterns are still in it."""
    return without_manifest(Path(shutil.copytree(folder, tmp_path / "copy")))


def write(folder: Path, text: str, name: str = "rules.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def specs(path: Path, rules: str | None = None) -> dict[str, ParamSpec]:
    return dict(ucp.describe(path, rules=rules).by_name)
