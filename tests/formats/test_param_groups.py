"""Numbers of files that live objects get are Python's own."""

import struct
from pathlib import PurePosixPath
from typing import Any

import pytest

from megatron_ucp.core.values import DtypeName, InertObject, VersionName, numpy_scalar
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.param_groups import number

TEXT = "static".encode("utf-32-le")


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (numpy_scalar("<f8", struct.pack("<d", 1024.0)), 1024.0),
        (numpy_scalar("<f4", struct.pack("<f", 0.5)), 0.5),
        (numpy_scalar("<i8", struct.pack("<q", 3)), 3),
        (numpy_scalar("|b1", b"\1"), True),
        (numpy_scalar("<U6", TEXT), "static"),
        (DtypeName("torch.float16"), "torch.float16"),
        (VersionName("2.13"), "2.13"),
        (PurePosixPath("a/b"), "a/b"),
        (True, True),
        (None, None),
        (2, 2),
        ([1], "<list>"),
    ],
)
def test_a_scalar_is_of_pythons_own_type(value: Any, want: Any) -> None:
    found = number(value)
    assert found == want and type(found) is type(want)


def test_a_loss_scaler_with_numpys_numbers() -> None:
    scale = numpy_scalar("<f8", struct.pack("<d", 256.0))
    stand = InertObject("x.DynamicLossScaler", state={"cur_scale": scale, "cur_iter": 4})
    found = LossScale.pickled(stand)
    assert found.said == {"cur_scale": 256.0, "cur_iter": 4}
    assert type(found.cur_scale) is float
