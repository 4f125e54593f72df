"""Keys of DeepSpeed's model files: its own, and so those of a program."""

PATTERNS = "universal_checkpoint_info"
# What DeepSpeed itself puts into the model file; every other key is the user's client state.
OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        PATTERNS,
        "folding",
        "sparse_tensor_module_names",
    }
)
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
HELPERS = ("random_ltd", "data_sampler")
# Members of enums in the arguments that Megatron-DeepSpeed has in its client state: (class, value)
# -> name; and their classes.
MEMBERS_OF_ARGUMENTS = {
    ("megatron.core.enums.ModelType", 1): "encoder_or_decoder",
    ("megatron.core.enums.ModelType", 2): "encoder_and_decoder",
}
OF_ARGUMENTS = frozenset(kind for kind, _ in MEMBERS_OF_ARGUMENTS)
