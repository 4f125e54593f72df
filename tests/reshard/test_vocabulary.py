"""A model with another padding of the vocabulary than the checkpoint's: what the refusal says."""

from dataclasses import replace

import pytest

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import ModelMismatchError
from megatron_ucp.families import families
from megatron_ucp.families.family import Sizes
from megatron_ucp.reshard.match import match_params

WORDS = "embedding.word_embeddings.weight"


def model(rows: int, true: int, tp: int) -> Manifest:
    """A Llama with so many rows of which the tokenizer has `true`."""
    sizes = Sizes(1, 8, 2, 2, 4, 16, rows, true, gated=True, biases=False, norm_biases=False)
    table = families()["llama"].table(sizes)
    specs = [
        ParamSpec(name, one.shape, "float32", "trainable", one.layout, extent=one.extent)
        for name, one in table.items()
    ]
    return Manifest(Keeper.PAPER, Mesh(tp=tp), tuple(specs), ())


def refused(have: Manifest, want: Manifest, *allow: str) -> ModelMismatchError:
    with pytest.raises(ModelMismatchError) as caught:
        match_params(have, want, frozenset(allow), "runs/llama/global_step5")
    return caught.value


def test_the_value_that_keeps_the_size_is_named() -> None:
    """64 rows at tp=1; Megatron-LM's padding at tp=4 makes 256 of them."""
    error = refused(model(64, 60, 1), model(256, 60, 4))
    assert error.id == "vocabulary" and error.parameter == WORDS
    assert (error.expected, error.found) == ("64 rows", "256 rows in the model")
    for said in (
        "--make-vocab-size-divisible-by 16 at tp=4",
        "1, 2, 4, 8, 16, 32, 64",
        "--allow-vocab-resize",
        'allow={"vocab"}',
        "shifts the loss",
    ):
        assert said in error.what_to_do
    assert "need no flag" not in error.what_to_do


def test_sizes_at_which_the_usual_padding_keeps_it() -> None:
    """50,257 ids become 50,304 rows at tp=1 and tp=3, with the divisor 128."""
    error = refused(model(50304, 50257, 1), model(50432, 50257, 2))
    assert "--make-vocab-size-divisible-by 25152 at tp=2" in error.what_to_do
    assert "of which 1, 3 need no flag;" in error.what_to_do


def test_a_tp_that_does_not_divide() -> None:
    error = refused(model(64, 60, 1), model(384, 60, 3))
    assert "64 rows don't divide by tp=3" in error.what_to_do
    assert "--make-vocab-size-divisible-by" not in error.what_to_do


def test_sizes_that_nobody_knows_the_tokenizer_of() -> None:
    """As Megatron-LM's own program says them: what is padding can't be known. The value that keeps
    the size is named; where it is allowed new rows are the engine's own, and no zeros."""
    error = refused(model(64, 64, 1), model(256, 256, 4))
    assert "--make-vocab-size-divisible-by 16 at tp=4" in error.what_to_do
    assert "or leaves new ones as the engine has them" in error.what_to_do
    fit = match_params(model(64, 64, 1), model(256, 256, 4), frozenset({"vocab"}), "")
    assert fit.resized[0].startswith(f"{WORDS}: 192 rows begin with the engine's values")
    fit = match_params(model(256, 256, 4), model(64, 64, 1), frozenset({"vocab"}), "")
    assert fit.resized[0] == f"{WORDS}: 192 rows dropped"


def test_what_is_allowed_is_listed() -> None:
    fit = match_params(model(64, 60, 1), model(256, 60, 4), frozenset({"vocab"}), "")
    assert fit.resized[0] == f"{WORDS}: 192 rows added as zeros"


def test_another_width_is_no_matter_of_the_vocabulary() -> None:
    have, want = model(64, 60, 1), model(64, 60, 1)
    wide = tuple(
        replace(spec, shape=(64, 16)) if spec.name == WORDS else spec for spec in want.params
    )
    error = refused(have, replace(want, params=wide))
    assert error.id == "model-mismatch" and "another shape" in error.problem
