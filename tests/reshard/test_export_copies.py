"""Exports in the dtype of training, which read the weights that the model computed with: half of
the masters' bytes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError, ForeignFileError, InexactError, SaveError
from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard import paper, twins
from tests.reshard.plain import SHAPES, edited

# (tp, pp, ep, etp, dp, ZeRO): stages at which model files hold the weights
MESHES = {
    "gpt": [(1, 1, 1, 1, 2, 1), (2, 1, 1, 2, 3, 2), (2, 2, 1, 2, 1, 1)],
    "mixtral": [(1, 1, 2, 1, 2, 1), (2, 1, 2, 1, 1, 2), (2, 1, 2, 2, 2, 1)],
}


def native(tmp_path: Path, family: str, mesh: tuple[int, ...], dtype: str = "bfloat16") -> Path:
    source = paper.write(twins.model(family, dtype=dtype), tmp_path / "source" / "step7")
    tp, pp, ep, etp, dp, zero = mesh
    to = ucp.Mesh(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp, zero=zero)
    folder = tmp_path / "native" / "tag"
    ucp.convert(source, folder, target=Target(to, stages="uniform" if pp > 1 else None))
    return folder


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "mesh"), [(family, mesh) for family, meshes in MESHES.items() for mesh in meshes]
)
def test_the_copies_give_the_bytes_that_the_masters_give(
    tmp_path: Path, family: str, mesh: tuple[int, ...], dtype: str
) -> None:
    source = native(tmp_path, family, mesh, dtype)
    copies = ucp.export_hf(source, tmp_path / "copies", verify=True)
    masters = ucp.export_hf(source, tmp_path / "masters", allow={"stale"}, verify=True)
    assert digest(tmp_path / "copies") == digest(tmp_path / "masters")
    assert copies.dtype == masters.dtype == dtype
    # what was read is more by the padding of the vocabulary, and by what checksums cover
    assert copies.written_bytes <= copies.read_bytes < 1.2 * copies.written_bytes
    assert masters.read_bytes >= 2 * masters.written_bytes


@pytest.mark.parametrize(
    ("zero", "trained", "dtype"),
    [(3, "bfloat16", "bfloat16"), (1, "bfloat16", "float16"), (1, "bfloat16", "float32")],
)
def test_the_masters_are_read_where_the_files_have_no_such_copies(
    tmp_path: Path, zero: int, trained: str, dtype: str
) -> None:
    source = native(tmp_path, "llama", (1, 1, 1, 1, 2, zero), trained)
    done = ucp.export_hf(source, tmp_path / "out", dtype=dtype)
    masters = done.written_bytes * (1 if dtype == "float32" else 2)
    assert masters <= done.read_bytes < 1.2 * masters


def test_a_buffer_keeps_its_dtype_beside_the_copies(tmp_path: Path) -> None:
    shapes = SHAPES | {"mask": (3, 2)}
    model = paper.plain_model(shapes, "bfloat16", {"mask": "buffer"}, {"mask": "float32"})
    source = paper.write(model, tmp_path / "source" / "step7")
    done = ucp.export_hf(source, tmp_path / "out", verify=True)
    ucp.export_hf(source, tmp_path / "masters", allow={"stale"})
    assert digest(tmp_path / "out") == digest(tmp_path / "masters")
    wanted = {name: model.truth(name).to(torch.bfloat16) for name in SHAPES}
    wanted["mask"] = model.truth("mask")
    assert twins.same(twins.read(tmp_path / "out"), wanted) == []
    assert done.read_bytes == done.written_bytes


# ------------------------------------------------ weights that are not the masters

NAME = "embed.weight"
LARGE = SHAPES | {NAME: (600, 4)}  # of its 2400 elements three runs of 512 are compared
MANY = {f"{number}.weight": (2, 3) for number in range(40)}  # every second one is sampled


def changed(
    tmp_path: Path,
    change: Callable[[torch.Tensor], object],
    shapes: dict[str, tuple[int, ...]] = LARGE,
    name: str = NAME,
) -> Path:
    """A checkpoint whose model file has other weights, as a program that does not know of the
    masters would leave it, or a file of another step."""

    def in_model_file(_: str, tree: dict[str, Any]) -> None:
        if "module" in tree:
            change(tree["module"][name].view(-1))

    model = paper.plain_model(shapes, "bfloat16")
    return edited(paper.write(model, tmp_path / "source" / "step7"), in_model_file)


def test_verify_compares_the_copies_with_the_masters(tmp_path: Path) -> None:
    source = changed(tmp_path, lambda weights: weights[700].add_(1))
    with pytest.raises(SaveError, match=r"(?s)1 of .*stale") as raised:
        ucp.export_hf(source, tmp_path / "out", verify=True)
    assert raised.value.parameter == NAME and not (tmp_path / "out").exists()
    ucp.export_hf(source, tmp_path / "copies")
    ucp.export_hf(source, tmp_path / "masters", allow={"stale"}, verify=True)
    copies, masters = (twins.read(tmp_path / which) for which in ("copies", "masters"))
    assert [name for name in masters if not torch.equal(copies[name], masters[name])] == [NAME]
    assert (copies[NAME] != masters[NAME]).sum() == 1


@pytest.mark.parametrize(
    ("shapes", "name", "element"),
    [(MANY, "1.weight", 0), *((LARGE, NAME, element) for element in (0, 1100, 2399))],
)
def test_a_copy_that_no_sample_of_a_load_sees_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], name: str, element: int
) -> None:
    """The file of a layer, or of an expert, may be of another step than all others."""
    source = changed(tmp_path, lambda weights: weights[element].add_(1), shapes, name)
    assert ucp.verify(source).findings == ()
    with pytest.raises(ForeignFileError, match="not those of the model file") as raised:
        ucp.export_hf(source, tmp_path / "out")
    assert raised.value.parameter == name and not (tmp_path / "out").exists()
    ucp.export_hf(source, tmp_path / "masters", allow={"stale"})
    model = paper.plain_model(shapes, "bfloat16")
    wanted = {name: model.truth(name).to(torch.bfloat16) for name in shapes}
    assert twins.same(twins.read(tmp_path / "masters"), wanted) == []


@pytest.mark.parametrize("element", [0, 700])  # one that is compared, and one that is not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_damaged_file(tmp_path: Path, dtype: torch.dtype, element: int) -> None:
    """Masters that are not compared are not read."""
    copies = dtype == torch.bfloat16
    source = changed(tmp_path, torch.Tensor.clone)
    path = next(source.glob("*model_states.pt" if copies else "*optim_states.pt"))
    values = paper.plain_model(LARGE).truth(NAME).to(dtype)
    data = bytearray(path.read_bytes())
    start = data.index(values.view(torch.uint8).numpy().tobytes())
    data[start + (element + 1) * values.element_size() - 1] ^= 128  # a sign
    path.write_bytes(data)
    if copies or not element:
        with pytest.raises(DamagedFileError, match="CRC-32") as raised:
            ucp.export_hf(source, tmp_path / "out")
        assert raised.value.file == str(path) and not (tmp_path / "out").exists()
    else:
        ucp.export_hf(source, tmp_path / "out")
        assert torch.equal(twins.read(tmp_path / "out")[NAME], values.to(torch.bfloat16))
    with pytest.raises(DamagedFileError, match="CRC-32"):
        ucp.export_hf(source, tmp_path / "verified", verify=True)


def test_copies_of_another_run_are_refused(tmp_path: Path) -> None:
    source = changed(tmp_path, torch.Tensor.neg_)
    with pytest.raises(ForeignFileError, match="not those of the model file"):
        ucp.export_hf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_that_is_infinite_is_no_value_of_its_master(tmp_path: Path) -> None:
    class Large(paper.Model):
        def truth(self, name: str, state: str = "fp32") -> torch.Tensor:
            found = super().truth(name, state).clone()
            if (name, state) == ("decoder.layers.1.mlp.linear_fc1.weight", "fp32"):
                found.view(-1)[1] = 7e4  # as a weight in fp16 it is infinite
            return found

    model = Large(**vars(twins.model("llama", dtype="float16")))
    source = paper.write(model, tmp_path / "source" / "step7")
    with pytest.raises(InexactError, match=r"layers\.1\.mlp.*: 1"):
        ucp.export_hf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------ copies that are averaged

RULES = """format = 1
[[rule]]
pattern = 'gain'
layout = "Partial"
axis = "tp"
"""


def test_a_mean_is_rounded_once(tmp_path: Path) -> None:
    """It is not the mean of what was rounded before."""
    own = torch.tensor([1 + 2**-9, 1 + 2**-7 + 2**-9])  # rounded they are 1 and 1 + 2**-7
    rules, folder = tmp_path / "rules.toml", tmp_path / "native" / "tag"
    rules.write_text(RULES)
    source = paper.write(paper.plain_model({"gain": (1,)}, "bfloat16"), tmp_path / "first" / "tag")
    ucp.convert(source, folder, target=Target(ucp.Mesh(tp=2, zero=1)), rules=rules)

    def drifted(name: str, tree: dict[str, Any]) -> None:
        master = float(own[int("mp_rank_01" in name)])
        if "module" in tree:
            tree["module"]["gain"].fill_(master)
        else:
            tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][0] = master

    edited(folder, drifted)
    for out, allow in (("copies", {"mean"}), ("masters", {"mean", "stale"})):
        ucp.export_hf(folder, tmp_path / out, rules=rules, allow=allow)
        found = twins.read(tmp_path / out)["gain"]
        assert torch.equal(found, own.double().mean(0, keepdim=True).to(torch.bfloat16)), out
