"""Stock programs of the newest Megatron-LM that is supported, resumed here on other meshes, and our
saves resumed by stock. The tests of the stack do so with the environment's megatron-core.

Losses are those of stock's own continuation, and every master, moment and step is gathered by code
that knows nothing of this package.
"""

import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.registry import open_checkpoint
from tests.stock.program import Job
from tests.stock.server import Server

pytestmark = pytest.mark.ranks
NEWEST = "0.19.2"
ROOT = Path(__file__).parents[2]
ALLOWED = 2e-6  # the order of additions

DISTRIBUTED = "--use-distributed-optimizer --ckpt-format torch_dist"
NAMED = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
PLAIN = "--ckpt-format torch_dist"
LEGACY = "--use-distributed-optimizer --ckpt-format torch --bf16"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP4 = "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 16"
CP2, VPP = "--context-parallel-size 2", f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-token-dispatcher-type alltoall"
)
ODD = (  # what mixtures of today have
    f"{MOE} --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --qk-layernorm"
)
MTP = "--mtp-num-layers 1"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8"
)
HYBRID = "--spec tests.stock.hybrid_layers local_stack --hybrid-layer-pattern"
OWN_LAYERS = (  # widths of their own, one without attention, one without an MLP
    f"--heterogeneous-layers-config-path {ROOT}/tests/stock/own_layers.json --rotary-percent 1.0 "
    "--use-rope-scaling --rope-scaling-factor 8 --use-rotary-position-embeddings"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def experts(ranks: int) -> str:
    return f"--expert-model-parallel-size {ranks}"


# what stock saves: flags, and those of BASE that are left out
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": (f"{DISTRIBUTED} {TP2}", ()),
    "mixture": (f"{DISTRIBUTED} {MOE} {experts(2)}", ()),
    "mtp": (f"{DISTRIBUTED} {MTP} {TP2}", ()),
    "latent": (f"{DISTRIBUTED} {LATENT} {PP2}", ("--group-query-attention",)),
    "latent-rows": (f"{DISTRIBUTED} {LATENT} {TP2}", ("--group-query-attention",)),
    "hybrid": (f"{DISTRIBUTED} {HYBRID} *-*-*-*- {TP2}", ("--num-layers",)),
    "context": (f"{DISTRIBUTED} {CP2}", ()),
    "own-layers": (f"{DISTRIBUTED} {OWN_LAYERS} {TP2}", ()),
    "named": (f"{NAMED} {TP2}", ()),
    "named-mixture": (f"{NAMED} {MOE} {experts(2)}", ()),
    "named-mtp": (f"{NAMED} {MTP} {TP2}", ()),
    "named-latent": (f"{NAMED} {LATENT} {PP2}", ("--group-query-attention",)),
    "named-hybrid": (f"{NAMED} {HYBRID} *-*-*-*- {TP2}", ("--num-layers",)),
    "stages": (f"{DISTRIBUTED} {PP2}", ()),
    "mtp-stages": (f"{DISTRIBUTED} {MTP} {PP2}", ()),
    "hybrid-stages": (f"{DISTRIBUTED} {HYBRID} *-*-|*-*- {PP2}", ("--num-layers",)),
    "plain": (f"{PLAIN} {TP2}", ()),
    "legacy": (f"{LEGACY} {TP2}", ()),
    "odd": (f"{DISTRIBUTED} {ODD} {experts(2)}", ()),
    "tied": (f"{DISTRIBUTED} {TP2}", ("--untie-embeddings-and-output-weights",)),
    "uneven": (f"{DISTRIBUTED} {PP2} --decoder-last-pipeline-num-layers 1", ()),
    "layout": (f"{DISTRIBUTED} {PP2} --pipeline-model-parallel-layout Et|tttL", ()),
    "overlap": (f"{DISTRIBUTED} {TP2} --overlap-grad-reduce --overlap-param-gather", ()),
    "dropout": (f"{DISTRIBUTED} {TP2} {DROPOUT}", ()),
    "context-dropout": (f"{DISTRIBUTED} {CP2} {DROPOUT}", ()),
    "context-mixture": (f"{DISTRIBUTED} {CP2} {MOE} {experts(2)}", ()),
}
# (source, ranks, flags of another mesh): what of the model has to be said again is the source's
Case = tuple[str, int, str]
RESUMED: list[Case] = [
    ("default", 4, f"{DISTRIBUTED} {PP2}"),
    ("mixture", 4, f"{DISTRIBUTED} {MOE} {experts(4)}"),
    ("mtp", 4, f"{DISTRIBUTED} {MTP} {PP2}"),
    ("latent", 1, f"{DISTRIBUTED} {LATENT}"),
    ("hybrid", 4, f"{DISTRIBUTED} {HYBRID} *-*-|*-*- {PP2}"),
    ("context", 4, f"{DISTRIBUTED} {TP2}"),
    ("own-layers", 4, f"{DISTRIBUTED} {OWN_LAYERS} {PP2}"),
]
LATER: list[Case] = [
    ("default", 4, f"{DISTRIBUTED} {TP4}"),
    ("default", 1, DISTRIBUTED),
    ("default", 4, f"{DISTRIBUTED} {VPP}"),
    ("default", 4, f"{DISTRIBUTED} {TP2} {CP2}"),
    ("named", 4, f"{NAMED} {PP2}"),
    ("named", 4, f"{NAMED} {TP4}"),
    ("named", 1, NAMED),
    ("stages", 4, f"{DISTRIBUTED} {TP2}"),
    ("mixture", 4, f"{DISTRIBUTED} {MOE} {PP2} {experts(1)}"),
    ("mixture", 4, f"{DISTRIBUTED} {MOE} {PP2} {experts(2)}"),
    ("named-mixture", 4, f"{NAMED} {MOE} {experts(4)}"),
    ("named-mtp", 4, f"{NAMED} {MTP} {PP2}"),
    ("mtp-stages", 1, f"{DISTRIBUTED} {MTP}"),
    ("named-latent", 1, f"{NAMED} {LATENT}"),
    ("latent-rows", 4, f"{DISTRIBUTED} {LATENT} {PP2}"),
    ("named-hybrid", 4, f"{NAMED} {HYBRID} *-*-|*-*- {PP2}"),
    ("hybrid-stages", 4, f"{DISTRIBUTED} {HYBRID} *-*-*-*- {TP2}"),
    ("plain", 4, f"{PLAIN} {PP2}"),
    ("plain", 4, f"{DISTRIBUTED} {PP2}"),
    ("odd", 4, f"{DISTRIBUTED} {ODD} {experts(4)}"),
    ("odd", 4, f"{DISTRIBUTED} {ODD} {PP2} {experts(1)} --moe-layer-freq [0,1,1,1]"),
    ("tied", 4, f"{DISTRIBUTED} {PP2}"),
    ("uneven", 4, f"{DISTRIBUTED} {TP2}"),
    ("layout", 4, f"{DISTRIBUTED} {TP2}"),
    ("overlap", 4, f"{DISTRIBUTED} {PP2} --overlap-grad-reduce"),
    ("dropout", 4, f"{DISTRIBUTED} {TP2} {DROPOUT}"),  # the same mesh: its random states too
    ("context", 4, f"{DISTRIBUTED} {CP2}"),
    ("context", 4, f"{DISTRIBUTED} {PP2}"),
    ("context", 4, f"{DISTRIBUTED} {PP2} {CP2}"),
    ("context", 1, DISTRIBUTED),
    ("context-dropout", 4, f"{DISTRIBUTED} {CP2} {DROPOUT}"),
    ("context-mixture", 4, f"{DISTRIBUTED} {MOE} {experts(4)}"),
    ("context-mixture", 4, f"{DISTRIBUTED} {MOE} {experts(2)}"),
]
# Latent attention of stock's local layers computes something else at another tp: stock's own load
# of the same state has other losses, too.
COMPUTED_OTHERWISE = {"latent-rows"}
# our save of a resumed run, by stock on the same mesh
BY_STOCK: list[Case] = [RESUMED[0], RESUMED[2], RESUMED[4]]
BY_STOCK_LATER: list[Case] = [
    RESUMED[1],
    RESUMED[6],
    ("latent", 4, f"{DISTRIBUTED} {LATENT} {PP2}"),
    ("context", 4, f"{DISTRIBUTED} {CP2}"),
    ("plain", 4, f"{PLAIN} {PP2}"),
    ("named-mtp", 4, f"{NAMED} {MTP} {PP2}"),
    ("named-hybrid", 4, f"{NAMED} {HYBRID} *-*-|*-*- {PP2}"),
]


class Stock:
    """The server of stock programs, and what was saved so far: each source once."""

    def __init__(self, folder: Path, sources: str) -> None:
        self.folder, self._count = folder, 0
        self.server = Server("tests.stock.program", sources)
        self._done: dict[Any, dict[str, Any]] = {}

    def run(self, **what: Any) -> dict[str, Any]:
        """A job that goes well: what rank 0 wrote."""
        self._count += 1
        return self.server.run(Job(str(self.folder / f"{self._count}.pt"), **what))

    def saved(self, source: str) -> dict[str, Any]:
        """Stock trains, saves, and trains on."""
        if source not in self._done:
            flags, without = SOURCES[source]
            flags = f"{flags} --save {self.folder / source}"
            self._done[source] = self.run(flags=flags, without=without, more=3)
        return self._done[source]

    def resumed(self, case: Case) -> dict[str, Any]:
        """This package loads what stock saved, trains, and saves."""
        if case not in self._done:
            source, world, flags = case
            want = self.saved(source)["file"]
            save = self.folder / f"ours{len(self._done)}"
            flags = f"{flags} --load {self.folder / source} --save {save}"
            without = SOURCES[source][1]
            found = self.run(
                flags=flags, world=world, without=without, ours=True, want=want, more=3
            )
            self._done[case] = {**found, "folder": save}
        return self._done[case]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    sources = ""
    if version("megatron-core").partition("+")[0] != NEWEST:
        subprocess.run(["bash", "tests/megatron_env.sh", NEWEST], cwd=ROOT, check=True)
        caches = ROOT / ".cache", *(ROOT / ".cache").glob("python*")
        folders = [one / "megatron" / NEWEST for one in caches]
        sources = str(next(one for one in folders if (one / ".whole").exists()))
    found = Stock(tmp_path_factory.mktemp("stock"), sources)
    assert found.server.version == NEWEST
    yield found
    found.server.close()


def slow(cases: Sequence[Any]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def show(case: Any) -> str:
    source, world, flags = case
    words = [word for word in flags.split() if word.isdigit() or word.endswith("parallel-size")]
    return f"{source} on {world} {' '.join(words).replace('-parallel-size', '')}"


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", [*RESUMED, *slow(LATER)], ids=show)
@pytest.mark.cases(2)
def test_pair(stock: Stock, case: Case) -> None:
    source, found = stock.saved(case[0]), stock.resumed(case)
    assert (found["iteration"], found["samples"]) == (3, 12)
    assert found["elements"] > 100_000 and len(source["after"]) == 3
    differences = [one for one in found["differences"] if not one.startswith("counters")]
    assert differences == [] and any("fp32" in one for one in found["planted"])
    if case[0] not in COMPUTED_OTHERWISE:
        assert largest(found["losses"], source["after"]) <= ALLOWED
    assert largest(source["losses"], source["after"]) > 1e-3, "another step has another loss"


@pytest.mark.parametrize("case", [*BY_STOCK, *slow(BY_STOCK_LATER)], ids=show)
def test_stock_goes_on_from_our_save(stock: Stock, case: Case) -> None:
    """Of three models by default."""
    ours = stock.resumed(case)
    _, world, flags = case
    without = SOURCES[case[0]][1]
    found = stock.run(
        flags=f"{flags} --load {ours['folder']}", world=world, without=without, want=ours["file"]
    )
    assert (found["iteration"], found["samples"]) == (6, 24)
    differences = [one for one in found["differences"] if not one.startswith("counters")]
    assert differences == [] and any("fp32" in one for one in found["planted"])
    assert largest(found["losses"], ours["after"]) <= ALLOWED


ACROSS = {
    "into a hybrid model": ("default", f"{HYBRID} *-*-|*-*- {PP2}", ("--num-layers",)),
    "out of one": ("hybrid", PP2, ()),
    "experts too": ("mixture", f"{HYBRID} *E*E*E*E {MOE} {experts(4)}", ("--num-layers",)),
}


@pytest.mark.parametrize("case", ["into a hybrid model", *slow(["out of one", "experts too"])])
def test_a_model_of_the_other_kind_goes_on(stock: Stock, case: str) -> None:
    """From stock's default form, with the optimizer, which stock itself refuses."""
    source, flags, without = ACROSS[case]
    want = stock.saved(source)
    other = str(stock.folder / source)
    found = stock.run(flags=f"{DISTRIBUTED} {flags}", without=without, other=other)
    assert largest(found["losses"], want["after"]) <= ALLOWED


def test_commands_take_a_folder_of_context_parallelism(stock: Stock, tmp_path: Path) -> None:
    stock.saved("context")
    folder = stock.folder / "context"
    assert "cp=2" in str(ucp.inspect(folder)) and ucp.verify(folder, deep=True)
    assert ucp.plan(folder, "dp=3,zero=3")
    targets = {
        "torch_dist": ucp.Target(mesh=ucp.Mesh(tp=2, dp=2)),
        "native": ucp.Target(mesh=ucp.Mesh(tp=2, dp=2, zero=1)),
    }
    for to, target in targets.items():
        ucp.convert(folder, tmp_path / to / "iter_0000003", to=to, target=target)
        assert ucp.diff(folder, tmp_path / to / "iter_0000003") == []
    found = ucp.export_hf(folder, tmp_path / "hf", dtype="float32", verify=True)
    assert found.tensors == 39
    with pytest.raises(UcpError, match="context"):
        ucp.plan(folder, "dp=2,cp=2,zero=1")


def test_legacy_files_in_bf16(stock: Stock) -> None:
    """Stock's own load of fp32 ones fails there, in its own code. Losses of bf16 are noisy."""
    found = stock.resumed(("legacy", 4, f"{LEGACY.replace('torch ', 'torch_dist ')} {PP2}"))
    differences = [one for one in found["differences"] if not one.startswith("counters")]
    assert differences == [] and any("fp32" in one for one in found["planted"])
    assert largest(found["losses"], stock.saved("legacy")["after"]) < 5e-2


def test_what_ours_writes_has_the_common_tree_in_a_file(stock: Stock) -> None:
    """All versions read `common.pt`; stock's own folder has none."""
    ours, theirs = stock.resumed(RESUMED[0])["folder"], stock.folder / "default"
    assert (ours / "iter_0000006" / "common.pt").is_file()
    assert not (theirs / "iter_0000003" / "common.pt").exists()
    with open_checkpoint(theirs) as checkpoint:
        assert checkpoint.extras.counters["global_steps"] == 3
