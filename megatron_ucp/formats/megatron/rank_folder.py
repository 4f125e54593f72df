"""The folders of Megatron-LM's older files: what each model-parallel rank has in one."""

import re
from dataclasses import dataclass

from megatron_ucp.core.mesh import Mesh

OF_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
RANDOM = "rng_state"  # of the first file


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of a model-parallel rank: tensor-parallel rank, stage, expert-parallel rank."""

    tp: int
    stage: int
    expert: int

    def name(self, mesh: Mesh) -> str:
        """As Megatron-LM calls it in a run on a mesh."""
        stage = f"_{self.stage:03d}" if mesh.pp > 1 else ""
        expert = f"_{self.expert:03d}" if mesh.ep > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}{expert}"
