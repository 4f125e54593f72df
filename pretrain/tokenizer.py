"""From text to ids: bytes, or a Hugging Face tokenizer in a local folder."""

import argparse
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_ucp.errors import NotFoundError, UsageError

BYTES = 256


class Tokenizer(Protocol):
    """`vocab_size` counts all ids, that of the end of a document (`eod`) too."""

    vocab_size: int
    eod: int

    def encode(self, data: bytes) -> np.ndarray: ...


class ByteTokenizer:
    """A byte is an id; the next id ends a document. With `ids`, Megatron's NullTokenizer: that many
    ids, made elsewhere."""

    def __init__(self, ids: int = BYTES) -> None:
        self.vocab_size, self.eod = ids + 1, ids

    def encode(self, data: bytes) -> np.ndarray:
        if self.eod < BYTES:
            raise UsageError(
                "text needs an id for every byte",
                expected=f"--vocab-size {BYTES} or more",
                found=self.eod,
            )
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


class HuggingFaceTokenizer:
    """`AutoTokenizer` of a folder; nothing is downloaded."""

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise NotFoundError(
                "--tokenizer-model is no folder",
                file=folder,
                fix="give a folder that save_pretrained wrote",
            )
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UsageError(
                "--tokenizer-model holds no tokenizer that transformers can read",
                file=folder,
                found=str(error).splitlines()[0],
            ) from None
        self.vocab_size = len(self._inner)
        if self._inner.eos_token_id is None:
            raise UsageError(
                "the tokenizer has no token for the end of a document",
                file=folder,
                expected="eos_token",
            )
        self.eod = int(self._inner.eos_token_id)

    def encode(self, data: bytes) -> np.ndarray:
        ids = self._inner.encode(data.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)


def make_tokenizer(args: argparse.Namespace) -> Tokenizer:
    if args.tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(args.tokenizer_model)
    return ByteTokenizer(args.vocab_size or BYTES)
