"""What an export did."""

from dataclasses import dataclass

from megatron_ucp import say


@dataclass(frozen=True)
class Exported:
    """What an export did. `read_bytes` and `written_bytes` are of tensors; `notes` say what is not
    as in the source; `verified` whether the files were read back and compared; `loadable` whether
    there is a config, without which no library loads the folder; `proved` what was compared."""

    path: str
    source_mesh: str
    dtype: str
    files: int
    tensors: int
    read_bytes: int
    written_bytes: int
    seconds: float
    verified: bool
    notes: tuple[str, ...]
    loadable: bool = True
    proved: str = ""

    def __str__(self) -> str:
        lacks = "" if self.loadable else "; NO LIBRARY LOADS IT YET: it has no config"
        return (
            f"wrote {self.path}: {self.source_mesh} -> Hugging Face; {self.tensors} tensors in "
            f"{self.dtype}, {say.amount(self.written_bytes)} in {self.files} "
            f"file{'s' if self.files != 1 else ''}, {say.duration(self.seconds)}, "
            f"{self.proved}{lacks}"
        )
