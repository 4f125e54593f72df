"""Flags of Megatron that this program knows and does not have: accepted without effect, or refused
by name."""

# Accepted without effect: what they ask for is what happens here, or a matter of speed alone. The
# number of values.
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

NO_DROPPING = "no token is dropped, whatever the load of an expert"

# Known elsewhere, refused here by name: the number of values (None: any), those that are the same
# as leaving it out, why.
REFUSED: dict[str, tuple[int | None, tuple[str, ...], str]] = {
    "--num-virtual-stages-per-pipeline-rank": (
        1,
        ("1",),
        "DeepSpeed's pipeline has no interleaved schedule",
    ),
    "--decoder-first-pipeline-num-layers": (
        1,
        (),
        "--pipeline-partition-method says which layers a stage holds",
    ),
    "--decoder-last-pipeline-num-layers": (
        1,
        (),
        "--pipeline-partition-method says which layers a stage holds",
    ),
    "--account-for-embedding-in-pipeline-split": (
        0,
        (),
        "--pipeline-partition-method says which layers a stage holds",
    ),
    "--account-for-loss-in-pipeline-split": (
        0,
        (),
        "--pipeline-partition-method says which layers a stage holds",
    ),
    "--pipeline-model-parallel-split-rank": (
        1,
        (),
        "models of encoder and decoder are not supported",
    ),
    "--enable-expert-tensor-parallelism": (0, (), "--expert-tensor-parallel-size says it"),
    "--expert-interval": (1, ("1",), "it counts layers otherwise than --moe-layer-freq"),
    "--mlp-type": (1, ("standard",), "--moe-shared-expert-intermediate-size is what comes nearest"),
    "--moe-grouped-gemm": (
        0,
        (),
        "grouped_gemm needs CUDA kernels, and keeps all experts of a rank in one tensor",
    ),
    "--moe-use-legacy-grouped-gemm": (0, (), "grouped_gemm is not supported"),
    "--moe-expert-capacity-factor": (1, (), NO_DROPPING),
    "--moe-train-capacity-factor": (1, (), NO_DROPPING),
    "--moe-eval-capacity-factor": (1, (), NO_DROPPING),
    "--moe-min-capacity": (1, (), NO_DROPPING),
    "--moe-token-drop-policy": (1, (), NO_DROPPING),
    "--moe-pad-expert-input-to-capacity": (0, (), NO_DROPPING),
    "--moe-router-load-balancing-type": (
        1,
        ("aux_loss",),
        "experts are balanced by --moe-aux-loss-coeff or --moe-router-enable-expert-bias",
    ),
    "--moe-router-dtype": (1, ("fp32",), "routers compute in fp32"),
    "--moe-router-topk-scaling-factor": (1, (), "scaled scores are not supported"),
    "--moe-router-num-groups": (1, (), "experts are chosen among all, not in groups"),
    "--moe-router-group-topk": (1, (), "experts are chosen among all, not in groups"),
    "--moe-input-jitter-eps": (1, (), "noise on the router's input is not supported"),
    "--moe-shared-expert-gate": (0, (), "a gate of the shared expert is not supported"),
    "--moe-shared-expert-overlap": (0, (), "it needs CUDA streams"),
    "--moe-permute-fusion": (0, (), "Transformer Engine is not supported"),
    "--moe-router-fusion": (0, (), "Transformer Engine is not supported"),
    "--moe-enable-deepep": (0, (), "DeepEP is not supported"),
    "--moe-layer-recompute": (0, (), "recomputation is not supported"),
    "--context-parallel-size": (
        1,
        ("1",),
        "megatron-core's attention without Transformer Engine runs no context parallelism; "
        "--ds-sequence-parallel-size shares sequences too",
    ),
    "--rotary-percent": (1, ("1", "1.0"), "partial rotary embeddings are not supported"),
    "--no-position-embedding": (0, (), "a model without position embeddings is in no family"),
    "--apply-query-key-layer-scaling": (
        0,
        (),
        "query-key layer scaling is not supported (it cancels out)",
    ),
    "--transformer-impl": (1, ("local",), "Transformer Engine is not supported"),
    "--deepspeed-activation-checkpointing": (0, (), "recomputation is not supported"),
    "--recompute-granularity": (1, (), "recomputation is not supported"),
    "--recompute-activations": (0, (), "recomputation is not supported"),
    "--rampup-batch-size": (None, (), "a global batch that grows is not supported"),
    "--no-save-optim": (0, (), "DeepSpeed always writes its optimizer's files"),
    "--vocab-file": (
        1,
        (),
        "this tokenizer is not supported; --tokenizer-type HuggingFaceTokenizer reads a local "
        "folder",
    ),
    "--merge-file": (
        1,
        (),
        "this tokenizer is not supported; --tokenizer-type HuggingFaceTokenizer reads a local "
        "folder",
    ),
}
