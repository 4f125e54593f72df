"""What a hostile source says in its values becomes no code in the files that are written of it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import ClassName, DtypeName, InertObject
from megatron_ucp.errors import UcpError, UnsafePickleError, UnsupportedError
from megatron_ucp.formats.megatron.writer import CommonFile
from megatron_ucp.formats.per_rank import OwnValues, RankDifferences
from megatron_ucp.formats.pt.pickle import dumps
from megatron_ucp.formats.pt.unpickle import VouchedClasses, loads, refuse_outside
from megatron_ucp.reshard import target as origins
from megatron_ucp.reshard.target import SourceSettings

INJECTED = "builtins.list\n0cposix\nsystem\n(X\x04\0\0\0trueR0cbuiltins\nlist"


@pytest.mark.parametrize(
    "value",
    [
        ClassName(INJECTED),
        ClassName("list"),
        InertObject(INJECTED, made="new"),
        DtypeName(INJECTED),
        DtypeName("torch.load"),
        InertObject("posix.system", ("true",)),
        InertObject("builtins.getattr", (ClassName("posix"), "system")),
        InertObject("posix.system", (("true",),), made="member"),
        InertObject("posix", ("__dict__",), made="member"),
    ],
)
def test_no_name_or_call_of_a_value_becomes_code(value: object) -> None:
    with pytest.raises(UcpError):
        dumps({"a": [value]})


@pytest.mark.parametrize("key", ["__items__", "__elements__", "__state__"])
def test_what_only_its_class_can_take_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"program\.Sub") as caught:
        dumps([InertObject("program.Sub", (), {key: {1: 2}}, made="new")])
    assert key in str(caught.value)


def test_a_name_of_a_pickle_is_one_line() -> None:
    module, _, name = INJECTED.encode().partition(b".")
    texts = b"".join(b"X" + len(one).to_bytes(4, "little") + one for one in (module, name))
    for vouched in (None, VouchedClasses(lambda _: True)):
        with pytest.raises(UnsafePickleError):
            loads(b"\x80\x04" + texts + b"\x93.", file="x", vouched=vouched)


def source_with(value: Any, place: str) -> Any:
    extras = dict.fromkeys(
        ("config", "scheduler", "client_state", "helpers", "modules", "stateless", "data_position")
    )
    group = ParamGroup({}, marks={"name": value} if place == "marks" else {})
    return SimpleNamespace(
        extras=SimpleNamespace(**{**extras, **({place: {"a": value}} if place in extras else {})}),
        manifest=SimpleNamespace(groups=[group], params=[]),
        main_file="main.pt",
    )


@pytest.mark.parametrize("place", ["client_state", "marks", "modules", "stateless", "rank"])
def test_a_conversion_looks_at_values_everywhere(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(origins, "with_model", lambda manifest: manifest)
    monkeypatch.setattr(origins, "says_layouts", lambda _: False)
    monkeypatch.setattr(origins, "training_dtype", lambda *_: "float32")
    for value, error in (
        (InertObject("posix.system", ("true",)), UnsafePickleError),
        (InertObject("program.Sub", (), {"__items__": {}}, made="new"), UnsupportedError),
    ):
        ranks = [OwnValues(), OwnValues({}, {"a": [value]})] if place == "rank" else []
        apart = RankDifferences(ranks=ranks)
        monkeypatch.setattr(origins, "apart_in", lambda _, apart=apart: apart)
        with pytest.raises(error) as caught:
            SourceSettings(source_with(value, place), False).take_values(None, ())
        assert caught.value.file == "main.pt"


def test_groups_may_name_classes_of_the_program() -> None:
    known = VouchedClasses(lambda _: False, names={"program.Kind"})
    member = InertObject("program.Kind", ("A",), made="member")
    refuse_outside({"param_groups": [{"kind": member}]}, known, "x")
    with pytest.raises(UnsafePickleError):
        refuse_outside({"state": [{"kind": member}]}, known, "x")


def test_a_nan_in_groups_of_megatron_equals_itself() -> None:
    check: Any = CommonFile._check_alike
    check(None, ("a", {"best": math.nan}), ("b", {"best": float("nan")}))
