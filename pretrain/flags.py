"""Every flag of `pretrain_gpt.py`: one row each. `arguments` parses and checks them,
docs/reference/pretrain.md prints them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrain.family import USUAL, default_by_family, default_for, trained_families


@dataclass(frozen=True)
class Flag:
    """A flag, its other spellings and its default. `kind` converts one value; bool is a switch
    without a value, and `value` is what the switch stores; `many` takes several values. `dest` is
    the attribute (None: from the name). `help` and `choices` are functions where they depend on the
    families, which may be registered after this module was imported."""

    name: str
    kind: Callable[[str], Any] | type = str
    default: Any = None
    help: str | Callable[[], str] = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | Callable[[], tuple[Any, ...]] = ()
    many: bool = False
    dest: str | None = None
    value: Any = True

    @property
    def attribute(self) -> str:
        return self.dest or self.name.lstrip("-").replace("-", "_")

    @property
    def text(self) -> str:
        return self.help if isinstance(self.help, str) else self.help()

    @property
    def allowed(self) -> tuple[Any, ...]:
        return self.choices if isinstance(self.choices, tuple) else self.choices()


MODEL = (
    Flag(
        "--model-family",
        choices=lambda: tuple(trained_families()),
        default=USUAL,
        help="sets norm, MLP, biases, positions and tying",
    ),
    Flag("--num-layers", int, help="required"),
    Flag("--hidden-size", int, help="required"),
    Flag("--num-attention-heads", int, help="required"),
    Flag(
        "--ffn-hidden-size",
        int,
        help="default 4 x hidden; with a gated MLP 8/3 x hidden, rounded down to 64",
    ),
    Flag("--kv-channels", int, help="head size; default hidden / heads"),
    Flag("--group-query-attention", bool, False, "needs --num-query-groups"),
    Flag(
        "--num-query-groups", int, help="default: one per head", aliases=("--num-key-value-heads",)
    ),
    Flag("--seq-length", int, help="required"),
    Flag("--max-position-embeddings", int, help="default --seq-length"),
    Flag(
        "--position-embedding-type",
        choices=("learned_absolute", "rope"),
        help="must be the family's",
    ),
    Flag(
        "--use-rotary-position-embeddings",
        dest="position_embedding_type",
        kind=bool,
        value="rope",
        help="as type rope",
    ),
    Flag("--rotary-base", int, 10000, aliases=("--rotary-position-embeddings-theta",)),
    Flag("--use-rope-scaling", bool, False, "long rotary wavelengths as in Llama 3.1"),
    Flag("--rope-scaling-factor", float, 8.0),
    Flag("--rotary-seq-len-interpolation-factor", float, help="divides rotary positions"),
    Flag(
        "--normalization",
        choices=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm"),
        help="must be the family's",
    ),
    Flag("--norm-epsilon", float, 1e-5, aliases=("--layernorm-epsilon",)),
    Flag("--swiglu", bool, help="must be the family's"),
    Flag("--openai-gelu", bool, False, "the tanh form of gelu, as GPT-2 has it: family gpt"),
    Flag("--disable-bias-linear", bool, help="must be the family's"),
    Flag(
        "--untie-embeddings-and-output-weights",
        bool,
        help=default_for("untie_embeddings_and_output_weights", True),
    ),
    Flag(
        "--tie-embeddings-and-output-weights",
        bool,
        dest="untie_embeddings_and_output_weights",
        value=False,
        help=default_for("untie_embeddings_and_output_weights", False),
    ),
    Flag("--attention-dropout", float, 0.1, default_by_family("attention_dropout", 0.1)),
    Flag("--hidden-dropout", float, 0.1, default_by_family("hidden_dropout", 0.1)),
    Flag("--init-method-std", float, 0.02),
    Flag(
        "--make-vocab-size-divisible-by",
        int,
        128,
        "first run only: a resumed run keeps the checkpoint's vocabulary",
    ),
)
EXPERTS = (
    Flag("--num-experts", int, help=default_by_family("num_experts", None)),
    Flag("--moe-ffn-hidden-size", int, help="width of an expert; default --ffn-hidden-size"),
    Flag(
        "--moe-shared-expert-intermediate-size",
        int,
        help="width of an expert that sees every token; default: there is none",
    ),
    Flag("--moe-layer-freq", int, 1, "layers 0, N, 2N, ... have experts, the others an MLP"),
    Flag("--moe-router-topk", int, 2, "experts that a token goes to", aliases=("--topk",)),
    Flag("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax"),
    Flag("--moe-router-pre-softmax", bool, False, "softmax over all experts, before the choice"),
    Flag(
        "--moe-router-enable-expert-bias",
        bool,
        False,
        "balances experts by a bias of the choice; needs sigmoid scores",
    ),
    Flag("--moe-router-bias-update-rate", float, 1e-3),
    Flag("--moe-aux-loss-coeff", float, 0.0, aliases=("--moe-loss-coeff",)),
    Flag("--moe-z-loss-coeff", float, 0.0),
    Flag("--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather"),
)
STACK = (
    Flag(
        "--engine",
        choices=("deepspeed", "megatron"),
        default="deepspeed",
        help="megatron: megatron-core's own gradient buffers, optimizer and pipeline",
    ),
    Flag(
        "--use-distributed-optimizer",
        bool,
        False,
        "data-parallel ranks share masters and moments",
    ),
    Flag(
        "--overlap-grad-reduce",
        bool,
        False,
        "gradients are reduced in buckets while the backward pass runs",
    ),
    Flag(
        "--overlap-param-gather",
        bool,
        False,
        "weights are gathered while the forward pass runs; needs --use-distributed-optimizer and "
        "--overlap-grad-reduce",
    ),
    Flag("--ddp-bucket-size", int, help="elements of a bucket; default megatron-core's"),
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        help="interleaved stages of so many layers each",
    ),
    Flag(
        "--pipeline-model-parallel-layout",
        help='layers of the stages in Megatron\'s words, as "Et|t*2|tL"',
    ),
)
MESH = (
    Flag("--tensor-model-parallel-size", int, 1),
    Flag(
        "--expert-model-parallel-size",
        int,
        1,
        "ranks that share the experts of a layer",
        aliases=("--moe-expert-parallel-size",),
    ),
    Flag(
        "--expert-tensor-parallel-size",
        int,
        help="ranks that cut an expert; default --tensor-model-parallel-size",
    ),
    Flag(
        "--pipeline-model-parallel-size",
        int,
        1,
        "stages of DeepSpeed's pipeline; needs ZeRO stage 0 or 1",
    ),
    Flag("--no-pipeline-parallel", bool, False, "one stage, which is the default"),
    Flag(
        "--pipeline-partition-method",
        default="type:transformer",
        aliases=("--pp-partition-method",),
        help="layers of the stages: uniform, parameters, type:REGEX, or their numbers as 1,3,1,2 "
        "(embedding, transformer layers, "
        "final norm, head)",
    ),
    Flag("--sequence-parallel", bool, False),
    Flag(
        "--ds-sequence-parallel-size",
        int,
        1,
        "ranks that share each sequence (Ulysses), under DeepSpeed beside data parallelism alone",
    ),
    Flag("--zero-stage", int, choices=(0, 1, 2, 3), help="default 1"),
    Flag(
        "--deepspeed_config",
        help="JSON file, merged with the flags; a contradiction is an error",
        aliases=("--deepspeed-config",),
    ),
    Flag(
        "--distributed-timeout-minutes",
        float,
        help="how long a rank waits for others at most; default 30, with --elastic 10",
    ),
)
ELASTIC = (
    Flag(
        "--elastic",
        bool,
        False,
        "after each start by torchrun: a mesh for the ranks that are there, the same global batch, "
        "from the newest whole tag in --save on; needs --save-interval and --global-batch-size",
    ),
    Flag(
        "--elastic-meshes",
        help='the meshes that are allowed, as "tp=2,dp=2,zero=1;tp=1,dp=3,zero=3"; default: tp, pp '
        "and ZeRO stage of the flags, dp fills",
    ),
    Flag(
        "--elastic-batch-tolerance",
        float,
        0.0,
        "where dp does not divide the global batch: by what share of it another number of samples "
        "may differ",
    ),
)
DATA = (
    Flag(
        "--data-path",
        many=True,
        help="prefixes of .bin/.idx, text files or folders; each may have a weight before it",
    ),
    Flag("--mock-data", bool, False),
    Flag("--split", default="969,30,1", help="weights of train, validation, test"),
    Flag(
        "--tokenizer-type",
        choices=("NullTokenizer", "ByteTokenizer", "HuggingFaceTokenizer", "HFTokenizer"),
        default="ByteTokenizer",
    ),
    Flag("--tokenizer-model", help="folder of a Hugging Face tokenizer; read locally only"),
    Flag(
        "--vocab-size",
        int,
        help="NullTokenizer: number of ids without the end-of-document id (default 256)",
    ),
)
TRAINING = (
    Flag("--micro-batch-size", int, help="required"),
    Flag("--global-batch-size", int, help="default --micro-batch-size x dp"),
    Flag("--train-iters", int, help="one of these three is required"),
    Flag("--train-samples", int),
    Flag("--train-tokens", int, help="as --train-samples times --seq-length"),
    Flag("--lr", float, help="required"),
    Flag("--min-lr", float, 0.0),
    Flag(
        "--lr-decay-style",
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Flag("--lr-decay-iters", int, help="default --train-iters"),
    Flag("--lr-decay-samples", int),
    Flag("--lr-warmup-iters", int),
    Flag("--lr-warmup-samples", int),
    Flag("--lr-warmup-fraction", float, help="of the decay"),
    Flag("--lr-warmup-init", float, 0.0),
    Flag(
        "--lr-wsd-decay-style",
        default="exponential",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    ),
    Flag("--lr-wsd-decay-iters", int),
    Flag("--lr-wsd-decay-samples", int),
    Flag("--weight-decay", float, 0.01),
    Flag("--clip-grad", float, help="default 1.0; 0 does not clip"),
    Flag("--adam-beta1", float, 0.9),
    Flag("--adam-beta2", float, 0.999),
    Flag("--adam-eps", float, 1e-8),
    Flag("--bf16", bool),
    Flag("--fp16", bool),
    Flag("--loss-scale", float, help="fp16: a fixed scale; default dynamic"),
    Flag("--initial-loss-scale", float, 2.0**32),
    Flag("--min-loss-scale", float, 1.0),
    Flag("--loss-scale-window", int, 1000),
    Flag("--hysteresis", int, 2),
    Flag("--seed", int, 1234, "of weights, dropout and sample order"),
)
CHECKPOINT = (
    Flag("--save", help="folder; one tag global_step{iteration} per save"),
    Flag("--save-interval", int, help="iterations; the end and SIGTERM save too"),
    Flag(
        "--keep-latest",
        int,
        help="after a save, remove all but so many of the newest whole tags; default: all stay",
    ),
    Flag(
        "--no-durable",
        bool,
        False,
        "saves don't wait for the disk: a power cut may take the newest ones",
    ),
    Flag(
        "--async-save",
        bool,
        False,
        "a save goes on while training does, once a snapshot of it is in host memory",
    ),
    Flag(
        "--keep-memory-every",
        int,
        help="each so many iterations the state is kept in the memory of the machines, where it "
        "outlives the processes: --load of the --save folder takes it where it is newer",
    ),
    Flag(
        "--keep-memory-copies",
        int,
        1,
        "on how many other machines each part of that is kept too",
    ),
    Flag("--no-save-rng", bool, False),
    Flag("--load", help="folder; a run starts afresh where it is empty"),
    Flag("--ckpt-step", int, help="iteration to load; default the newest that is whole"),
    Flag("--load-tag", help="as --ckpt-step, by the name of the tag"),
    Flag("--universal-checkpoint", bool, False, "load whatever is there on whatever mesh this is"),
    Flag(
        "--allow-vocab-resize",
        bool,
        False,
        "where the checkpoint's padded vocabulary does not divide by tp: drop rows, or add zero "
        "rows; shifts the loss",
    ),
    Flag(
        "--allow-other-data",
        bool,
        False,
        "go on at the checkpoint's sample position in other data than the run's",
    ),
    Flag("--export-hf", help="folder: the weights for transformers, at the end"),
    Flag("--exit-on-missing-checkpoint", bool, False),
    Flag(
        "--finetune",
        bool,
        False,
        "weights only: no optimizer, no scheduler, no random states, from iteration 0",
    ),
    Flag("--no-load-optim", bool, False, "neither optimizer states nor scheduler"),
    Flag("--no-load-rng", bool, False),
    Flag("--use-checkpoint-args", bool, False, "the model's sizes come from the checkpoint"),
    Flag(
        "--override-opt_param-scheduler",
        bool,
        False,
        "changed settings of the schedule win over the checkpoint's",
    ),
    Flag(
        "--use-checkpoint-opt_param-scheduler",
        bool,
        False,
        "the checkpoint's settings of the schedule win",
    ),
)
LOGGING = (
    Flag("--log-interval", int, 100),
    Flag("--eval-interval", int, 1000),
    Flag("--eval-iters", int, 100, "0: no evaluation"),
    Flag("--exit-interval", int, help="save and exit when the iteration is a multiple of it"),
    Flag("--exit-duration-in-mins", float, help="save and exit after this time"),
    Flag("--tensorboard-dir", help="needs the package tensorboard"),
    Flag("--log-json", help="file; one JSON object per iteration, with the loss in full"),
)
GROUPS = {
    "Model": MODEL,
    "Experts": EXPERTS,
    "Mesh": MESH,
    "Elastic runs": ELASTIC,
    "Megatron's own engine": STACK,
    "Data": DATA,
    "Training": TRAINING,
    "Checkpoint": CHECKPOINT,
    "Logging": LOGGING,
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)

# Flags of Megatron that are accepted without effect: what they ask for is what happens here, or a
# matter of speed alone. The number of values.
IGNORED = {
    "--deepspeed": 0,
    "--local_rank": 1,
    "--data-impl": 1,
    "--data-cache-path": 1,
    "--no-bias-gelu-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--no-bias-dropout-fusion": 0,
    "--no-masked-softmax-fusion": 0,
    "--no-rope-fusion": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--no-persist-layer-norm": 0,
    "--no-query-key-layer-scaling": 0,
    "--use-mcore-models": 0,
    "--use-cpu-initialization": 0,
    "--num-workers": 1,
    "--distributed-backend": 1,
    "--no-async-tensor-model-parallel-allreduce": 0,
    "--disable-moe-token-dropping": 0,
}
# Those of Megatron with the only values that say what happens here.
NEUTRAL = {
    "--context-parallel-size": ("1",),
    "--expert-interval": ("1",),
    "--mlp-type": ("standard",),
    "--moe-router-dtype": ("fp32",),
    "--moe-router-load-balancing-type": ("aux_loss",),
    "--num-virtual-stages-per-pipeline-rank": ("1",),
    "--rotary-percent": ("1", "1.0"),
    "--transformer-impl": ("local",),
}
