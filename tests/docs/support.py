"""What is supported, and which tests show it: the tables of docs/reference/formats.md.

A row is what it is about, a mark for each column, and the files of tests that run it. ✓ tested bit
for bit; ⚠ with limits, which the text in brackets names; ✗ refused; empty: does not apply.
"""

Y, L, N = "✓", "⚠", "✗"
RUN = ("resume", "save", "convert", "export")

TABLES: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "deepspeed": (
        RUN,
        (
            ("ZeRO 0, 1, 2, 3; fp32, bf16, fp16; BF16_Optimizer", Y, Y, Y, Y, "engines/test_pairs"),
            ("optimizer offloaded to the CPU", Y, Y, Y, Y, "engines/test_features"),
            (
                "files without a manifest (plain DeepSpeed)",
                "⚠ (at ZeRO 0 the weights alone)",
                "",
                Y,
                Y,
                "engines/test_older, engines/test_positions",
            ),
            (
                "universal folders, of DeepSpeed's converter too",
                Y,
                "",
                Y,
                Y,
                "reshard/test_convert_universal",
            ),
            (
                "Ulysses (ranks that share sequences, by an mpu)",
                Y,
                Y,
                Y,
                Y,
                "engines/test_sequence_parallel",
            ),
            ("hpZ (ZeRO++): its files", Y, N, Y, Y, "engines/test_features"),
            (
                "ZeRO++ with quantized weights: its files",
                "⚠ (8-bit frozen weights lack their scales)",
                N,
                L,
                L,
                "engines/test_what_stock_loses",
            ),
            ("ZenFlow: its files", "⚠ (`stale`)", N, L, L, "engines/test_what_stock_loses"),
            (
                "SuperOffload, partial offload: their files",
                "⚠ (weights alone)",
                N,
                N,
                L,
                "engines/test_what_stock_loses",
            ),
            ("NVMe offload, MiCS", N, N, N, N, "engines/test_features"),
        ),
    ),
    "tensor": (
        RUN,
        (
            ("AutoTP, equal shares, ZeRO 0 to 3", Y, Y, Y, Y, "engines/test_autotp"),
            (
                "AutoTP, shares of different sizes (61 rows as 31 and 30)",
                Y,
                Y,
                "⚠ (to tp=1)",
                Y,
                "engines/test_autotp_tools",
            ),
            ("AutoTP around adapters of peft, which it drops", N, N, "", "", "engines/test_lora"),
            (
                "megatron-core's GPT, LLaMA, Mixtral, Mistral, Qwen2, Qwen3 and its experts",
                Y,
                Y,
                Y,
                Y,
                "engines/test_tensor_parallel",
            ),
            (
                "any other model of megatron-core's modules",
                Y,
                Y,
                Y,
                "",
                "engines/test_mcore_any_model",
            ),
            (
                "Megatron-DeepSpeed's own program, with and without its pipeline, ZeRO 0 to 3, "
                "experts",
                "⚠ (into ZeRO-3, where the program makes other groups, with `hyper`)",
                Y,
                Y,
                "⚠ (rotary positions)",
                "stock/test_megatron_deepspeed",
            ),
            (
                "forks of it",
                Y,
                Y,
                "⚠ (rules)",
                "⚠ (rules)",
                "engines/test_fork",
            ),
            ("other models, with a family or rules", Y, Y, Y, "", "reshard/test_rules"),
            (
                "context parallelism, on megatron-core's own engine",
                Y,
                Y,
                "✓ (to a mesh without it)",
                Y,
                "stock/test_versions",
            ),
        ),
    ),
    "pipelines": (
        RUN,
        (
            (
                "DeepSpeed's PipelineEngine with a family, ZeRO 0 and 1; to and from no pipeline",
                Y,
                Y,
                Y,
                Y,
                "engines/test_pipeline",
            ),
            (
                "megatron-core's own, interleaved and uneven stages too",
                Y,
                Y,
                Y,
                Y,
                "engines/test_megatron_pairs",
            ),
            (
                "layer files at ZeRO 1 without a manifest and a family",
                N,
                "",
                "⚠ (rules)",
                "⚠ (rules)",
                "reshard/test_rules",
            ),
            (
                "layer files at stage 0 without a manifest; DualPipeV",
                N,
                "✗ (DualPipeV)",
                N,
                N,
                "engines/test_pipeline_files",
            ),
        ),
    ),
    "experts": (
        ("train, save, resume", "convert to"),
        (
            (
                "megatron-core's, ep x tp, ZeRO 0, 1, 2; etp = tp, or etp <= tp <= etp x ep",
                Y,
                Y,
                "engines/test_mixtral",
            ),
            (
                "the same in pipeline stages, ZeRO 0, 1; a layer with experts on every stage",
                Y,
                Y,
                "engines/test_mixtral",
            ),
            (
                "ep = 1 and etp = tp, ZeRO 0 to 3: experts are parameters like others",
                Y,
                Y,
                "engines/test_mixtral",
            ),
            (
                "ep > 1 at ZeRO 3; etp > tp; etp x ep < tp: DeepSpeed can't train or save these",
                N,
                N,
                "reshard/test_untrainable_meshes",
            ),
            (
                "`deepspeed.moe`, any ep, ZeRO 0, 1, 2; experts with buffers, frozen ones; PR-MoE",
                Y,
                Y,
                "engines/test_moe",
            ),
            ("`deepspeed.moe` at ZeRO 3, or with several ep sizes", N, N, "engines/test_moe"),
            (
                "AutoEP, any ep, ZeRO 0 to 3",
                Y,
                "⚠ (ZeRO 1 to 3, no universal folders)",
                "engines/test_autoep",
            ),
            (
                "AutoEP folded with AutoTP, or with experts in unequal runs",
                N,
                N,
                "engines/test_autoep",
            ),
            (
                "TEGroupedMLP under megatron-core's own optimizer",
                "✓ (stand-in)",
                Y,
                "engines/test_megatron_grouped",
            ),
            ("GroupedMLP; both under DeepSpeed", N, N, "reshard/test_grouped"),
        ),
    ),
    "megatron": (
        ("read", "resume on", "write"),
        (
            ("`torch_dist`, `fully_reshardable`", Y, Y, Y, "formats/test_torch_dist"),
            (
                "`torch_dist`, `dp_reshardable` (the default)",
                Y,
                Y,
                "",
                "formats/test_megatron_flat",
            ),
            ("`torch_dist` of plain optimizers", Y, Y, Y, "engines/test_megatron_golden"),
            ("legacy `torch`", Y, Y, "", "engines/test_megatron_legacy"),
            (
                "Transformer Engine's layers and Adam, Apex' Adam",
                Y,
                "✓ (stand-ins)",
                Y,
                "engines/test_megatron_fused",
            ),
            (
                "precision-aware optimizers, whose files hold fp32",
                Y,
                N,
                N,
                "engines/test_megatron_layout",
            ),
            (
                "offloaded optimizers, fp8 parameters, Megatron-FSDP, `fsdp_dtensor`, `torch_dcp`",
                N,
                N,
                N,
                "formats/test_megatron_damaged",
            ),
        ),
    ),
    "fsdp2": (
        ("read", "resume on", "write"),
        (
            (
                "Accelerate's and Trainer's: `pytorch_model_fsdp_0` and `optimizer_0`",
                *(Y, Y, Y),
                "engines/test_fsdp2_pairs",
            ),
            (
                '`dcp.save({"model": ..., "optim": ...})`, any mesh of FSDP2, also with '
                "copies (HSDP) or tensor parallelism",
                *(Y, Y, Y),
                "engines/test_fsdp2_pairs",
            ),
            (
                "torchtitan 0.3: llama3, qwen3 with and without experts, deepseek_v3, gpt_oss",
                *(Y, Y, Y),
                "reshard/test_torchtitan, engines/test_torchtitan",
            ),
            ("flat, under names of your own", Y, Y, "", "formats/test_dcp"),
            ("weights in bf16 and their moments", Y, Y, "", "formats/test_dcp"),
            ("names of transformers for a family's modules", Y, Y, Y, "reshard/test_dcp"),
            (
                "the same with experts in one tensor, as transformers 5 has them in memory",
                *(Y, Y, ""),
                "reshard/test_dcp",
            ),
            (
                "states by position, in 8 bits or factored; several optimizers; a live engine; "
                "torchtitan's layers for further tokens; Megatron-FSDP's `fsdp_dtensor`",
                *(N, N, N),
                "formats/test_dcp",
            ),
        ),
    ),
    "models": (
        ("0.16.1", "0.17.1", "0.18.2", "0.19.2", "main, August 2026"),
        (
            (
                "GPT, LLaMA: every format above, to other tp, pp, dp; into stock",
                *(Y, Y, Y, Y, Y),
                "stock/test_versions",
            ),
            ("mixtures: to other ep, pp; into stock", *(Y, Y, Y, Y, Y), "stock/test_versions"),
            (
                "shared experts, leading dense layers, biased routers, q/k norms",
                *(Y, "", "", Y, ""),
                "stock/test_versions",
            ),
            (
                "multi-token prediction; into stock",
                *(Y, Y, "✓ (default form)", Y, "not built without Transformer Engine"),
                "stock/test_versions",
            ),
            ("latent attention; into stock", *(Y, "", "", Y, ""), "stock/test_versions"),
            (
                "hybrid models of attention and MLP; into stock",
                *("MambaModel", "", "✓ (default form)", Y, Y),
                "stock/test_versions",
            ),
            (
                "a GPTModel's default files into a hybrid model and back",
                *("", "", "", Y, ""),
                "stock/test_versions",
            ),
            (
                "Mamba and gated delta nets, with the recurrence in plain torch",
                *(Y, "", "", Y, ""),
                "stock/test_versions",
            ),
            (
                "context parallelism 2 to 1 and back, mixtures",
                *(Y, "", "", Y, ""),
                "stock/test_versions",
            ),
        ),
    ),
    "hugging-face": (
        ("export", "load into an engine"),
        (
            ("the families", Y, Y, "engines/test_parity"),
            (
                "any model of transformers, under the names of released folders",
                Y,
                Y,
                "engines/test_transformers_classes",
            ),
            ("adapters of peft", Y, "", "engines/test_lora"),
            (
                "adapters on a base in 4 or 8 bits (bitsandbytes)",
                Y,
                "✓ (resume)",
                "engines/test_quantized",
            ),
            (
                "weights in fp8 blocks, read as fp32",
                "",
                Y,
                "reshard/test_fp8_blocks",
            ),
            (
                "otherwise quantized weights (MXFP4, int8) of a folder",
                N,
                N,
                "reshard/test_import_edges",
            ),
        ),
    ),
}
