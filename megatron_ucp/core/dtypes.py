"""Names of dtypes, as people write them."""

_SHORT = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def dtype_name(dtype: object) -> str:
    """`bfloat16` for `torch.bfloat16`, "torch.bfloat16", "bf16" and "bfloat16"; what is no dtype is
    given back as text, for whoever lists the dtypes that are possible."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)
