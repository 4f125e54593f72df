from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HELP = "docs/troubleshooting.md"  # which `megatron-ucp help` prints


class BuildWithHelp(build_py):
    """The package has the page of errors: an installed machine has no docs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(HELP, str(Path(self.build_lib, "megatron_ucp", Path(HELP).name)))


# The base install leaves the user's torch, DeepSpeed and Megatron-Core as they are: it asks for no
# version of theirs but torch 2.6. The extras are what the tests run against, for whoever starts
# from nothing: the newest tested versions that the interpreter can have. Megatron-Core wants Python
# 3.12 from 0.17 on. DeepSpeed and Megatron-Core change their file formats without notice: each is
# exact.
OLD, NEW = 'python_version < "3.12"', 'python_version >= "3.12"'
TORCH = [f"torch==2.13.0; {OLD}", f"torch==2.14.1; {NEW}"]
DEEPSPEED = [*TORCH, "deepspeed==0.19.8"]
MEGATRON = [*TORCH, f"megatron-core==0.16.1; {OLD}", f"megatron-core==0.19.2; {NEW}"]
REMOTE = ["obstore>=0.12"]
HUGGING_FACE = ["transformers>=5,<6"]
# ruff, pyright and zensical exactly: a new release must not fail a commit that did not change
DEV = [
    "pytest>=8",
    "hypothesis>=6.100",
    "ruff==0.17.5",
    "pyright==1.1.414",
    "pre-commit>=4",
    "matplotlib>=3.8",
    "accelerate>=1",
    "psutil>=5.9",
    "tensorboard>=2.16",
    "zensical==0.0.73",
    "moto[server]>=5.2",
    *REMOTE,
]

setup(
    name="megatron-ucp",
    version="0.1.0",
    description="Universal checkpointing for DeepSpeed and Megatron: resume a training job on any "
    "other mesh",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=[*find_packages(include=["megatron_ucp", "megatron_ucp.*"]), "megatron_ucp_patches"],
    package_dir={"megatron_ucp_patches": "patches"},
    package_data={
        "megatron_ucp": ["py.typed", "formats/rules/*.toml"],
        "megatron_ucp_patches": ["*.patch"],
    },
    install_requires=[
        "torch>=2.6",
        "isal>=1.9",
        "numpy>=1.26",
        "safetensors>=0.4",
        "shtab>=1.6",
        "tqdm>=4.60",
    ],
    extras_require={
        "deepspeed": DEEPSPEED,
        "megatron": MEGATRON,
        "hf": HUGGING_FACE,
        "remote": REMOTE,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["megatron-ucp = megatron_ucp.cli:main"]},
    cmdclass={"build_py": BuildWithHelp},
    zip_safe=False,
)
