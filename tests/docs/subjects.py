"""What the tests are about: subject, files, and the oracle that decides what is right.

tests/README.md prints it. A file of tests stands in one row or more; a pattern that matches no file
is an error.
"""

SUBJECTS: tuple[tuple[str, str, str], ...] = (
    (
        "arithmetic of layouts, plans, rules",
        "core/test_*",
        "laws on random cases; numpy indexing, one element at a time",
    ),
    (
        "a third engine, and a format of its own",
        "engines/test_third_engine",
        "its state in DeepSpeed's engine and back; the fingerprint",
    ),
    (
        "the `.pt` container and pickles",
        "formats/pt/test_*, formats/test_rank_files",
        "torch.load, Python's zipfile and pickle, numpy",
    ),
    (
        "hostile and damaged input",
        "formats/test_hostile_values, formats/test_fuzz, formats/test_extent, "
        "formats/test_own_faults, engines/test_hostile*, engines/test_bad_input, "
        "reshard/test_hostile_cli, reshard/test_review_faults",
        "a named error, nothing run, nothing left; planted faults",
    ),
    (
        "DeepSpeed's files",
        "formats/test_golden, formats/test_universal, formats/test_older, formats/test_rounding, "
        "formats/test_schedule*, "
        "formats/test_steppers, formats/test_prefixes, formats/test_partition, "
        "formats/test_autotp_maps, formats/test_rule_file, formats/test_param_groups",
        "golden folders that DeepSpeed wrote; DeepSpeed's own functions",
    ),
    (
        "Megatron's files",
        "formats/test_megatron_*, formats/test_torch_dist, reshard/test_megatron_*",
        "torch's own reader; golden folders that Megatron-LM wrote",
    ),
    (
        "FSDP2's folders",
        "formats/test_dcp, reshard/test_dcp, engines/test_fsdp2_pairs, engines/test_save_as",
        "torch's own gather and reader; programs of torch, Accelerate and Trainer alone",
    ),
    (
        "torchtitan's folders",
        "reshard/test_torchtitan, engines/test_torchtitan",
        "plain torch; torchtitan's own modules and checkpointer; logits of transformers",
    ),
    (
        "Hugging Face folders",
        "formats/test_hugging_face_folder, formats/test_safetensors_file, families/test_*, "
        "reshard/test_export*, reshard/test_import_edges, reshard/test_released_names, "
        "reshard/test_fp8_blocks, engines/test_hugging_face, engines/test_model_classes, "
        "engines/test_mixtures_of_transformers",
        "`save_pretrained`, the safetensors library, plain torch",
    ),
    (
        "logits of both sides",
        "engines/test_parity, engines/test_deepseek, engines/test_gpt_oss",
        "transformers",
    ),
    (
        "object stores",
        "reshard/test_store_faults, engines/test_stores, formats/test_store_saves, "
        "test_object_server",
        "moto's S3; the disk; a server of the tests' own, with faults",
    ),
    (
        "tags, pointers, locks, retention",
        "formats/test_tags, formats/test_pointers, formats/test_two_jobs, "
        "formats/test_publish_right, formats/test_manifest_*, "
        "reshard/test_pointers",
        "kills between any two operations; two processes",
    ),
    (
        "agreement of ranks",
        "reshard/test_agree, reshard/test_joined_sums, engines/test_steps, engines/test_waits",
        "any number of ranks as threads; a failure planted at each step, on each rank",
    ),
    (
        "what every move guarantees",
        "reshard/test_transfer, reshard/test_execute, reshard/test_overflows, reshard/test_pages, "
        "reshard/test_copied_layout, reshard/test_range_writer, reshard/test_process_memory, "
        "*/test_read_once",
        "one body for each guarantee over every pair of source and sink",
    ),
    (
        "resume of DeepSpeed engines, every mesh",
        "engines/test_pairs, engines/test_features, engines/test_stage_0, engines/test_positions, "
        "engines/test_tensor_parallel, engines/test_pipeline*, engines/test_sequence_parallel, "
        "engines/test_published, engines/test_older, engines/test_differential, "
        "engines/test_defects, engines/test_unsaved, engines/test_dualpipev, engines/test_devices",
        "states gathered by DeepSpeed's own accessors, without this package; stock's load",
    ),
    (
        "AutoTP, AutoEP, experts, Muon",
        "engines/test_autotp*, engines/test_autoep, engines/test_moe, engines/test_mixtral, "
        "engines/test_expert_*, engines/test_muon, reshard/test_*tools, "
        "reshard/test_untrainable_meshes, reshard/test_grouped",
        "the same gather; the gradients of one rank",
    ),
    (
        "models, other trainable parameters",
        "engines/test_models, engines/test_any_model, engines/test_odd_models, "
        "engines/test_trainable, engines/test_regrouped, engines/test_parts, engines/test_lora, "
        "engines/test_quantized, "
        "engines/test_fork, engines/test_megatron_deepspeed",
        "the same gather; peft's own files; the uncut model; ranks of Megatron-DeepSpeed's program",
    ),
    (
        "what lies beside tensors",
        "engines/test_resume, engines/test_values, engines/test_own_values, engines/test_loader, "
        "engines/test_optimizers, engines/test_rules_of_steps, engines/test_batch",
        "type and bits of each value by each way",
    ),
    (
        "saves",
        "engines/test_saves, engines/test_kept_plans, engines/test_direct, engines/test_blocked, "
        "engines/test_pt_pickles, engines/test_beside, engines/test_ends, engines/test_hung, "
        "engines/test_trainers, engines/test_lightning",
        "`torch.save` record by record; kills at random moments; exit codes",
    ),
    (
        "fingerprint, identity, refusals",
        "engines/test_fingerprint, engines/test_identity, engines/test_doors, engines/test_alike, "
        "engines/test_advice, engines/test_versions",
        "planted faults; each advice is followed to its end",
    ),
    (
        "resize, refit and in-memory checkpoints",
        "engines/test_resize, engines/test_refit, engines/test_memory_*",
        "a gather that knows nothing of the package; a run without interruption",
    ),
    (
        "megatron-core's own engine",
        "engines/test_stack*, engines/test_live_bucket, engines/test_megatron_files, stock/test_*",
        "megatron-core's own reader; losses of stock Megatron-LM",
    ),
    (
        "conversions",
        "reshard/test_convert*, reshard/test_upstream, reshard/test_rules, "
        "reshard/test_vocabulary, reshard/test_work_sharing, reshard/test_launched",
        "plain torch puts the files together; stock DeepSpeed loads them",
    ),
    (
        "commands",
        "reshard/test_cli, reshard/test_commands, reshard/test_main*, reshard/test_verify, "
        "reshard/test_preview, reshard/test_forecast, reshard/test_doctor, reshard/test_rule*",
        "what a user reads: text, JSON, exit codes",
    ),
    (
        "what is missing is noticed",
        "*/test_absence",
        "one table: which file says what must be there",
    ),
    (
        "the training program",
        "pretrain/test_*",
        "megatron-core on one rank; losses of the unbroken run",
    ),
    ("pages", "docs/test_*", "the commands themselves, the code's own tables"),
    (
        "the house itself",
        "test_*",
        "imports, names, versions, the wheel, the examples as a user starts them",
    ),
)
