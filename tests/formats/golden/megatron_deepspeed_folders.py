"""The golden folders of Megatron-DeepSpeed's program: the mesh and the flags of each."""

from dataclasses import dataclass
from pathlib import Path

from megatron_ucp.core.mesh import Mesh

FOLDER = Path(__file__).parent / "megatron_deepspeed"
SWIGLU = "--swiglu --untie-embeddings-and-output-weights --normalization rmsnorm"
SWIGLU += " --disable-bias-linear"
ROTARY = "--use-rotary-position-embeddings --no-position-embedding"
ALONE = "--no-pipeline-parallel"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


OF_ALL = "--train-iters 8 --vocab-size 127 --exit-interval 6"


@dataclass(frozen=True)
class Made:
    """How a folder was made: `flags` of the mesh, `model` those of what it computes."""

    mesh: Mesh
    flags: str
    model: str = ""
    dtype: str = "fp32"


FOLDERS = {
    "gpt_tp2pp2_z1": Made(Mesh(tp=2, pp=2, dp=1, zero=1), f"{TP2} {PP2}"),
    "gpt_pp2_z1_bf16": Made(Mesh(pp=2, dp=1, zero=1), PP2, dtype="bf16"),
    "llama_tp2_z1": Made(Mesh(tp=2, dp=1, zero=1), TP2, SWIGLU),
    "gpt_nopipe_z3_dp2": Made(Mesh(dp=2, zero=3), ALONE, "--hidden-size 32 --ffn-hidden-size 128"),
    "rope_nopipe_tp2_z2": Made(Mesh(tp=2, dp=2, zero=2), f"{ALONE} {TP2}", ROTARY),
}
