"""Small pickles that ask for much, and random ones: little time, little memory, named errors, and
nothing is run."""

import io
import pickle
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp.errors import DamagedFileError, UcpError
from megatron_ucp.formats.pt import unpickle as safe_pickle
from megatron_ucp.formats.pt.unpickle import AllowedClasses, loads
from tests.formats.craft import (
    call,
    dict_of,
    mutated,
    named,
    numbers,
    pickle_of,
    storage,
    tensor,
    text,
    tuple_of,
    watch,
)

NONE, BUILD = b"N", b"b"


def deep_tuple(depth: int) -> bytes:
    return b")" + b"\x85" * depth


FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


def nested_calls(depth: int) -> bytes:
    head, tail = b"(" + named(FROM_TYPE) + named("torch.Tensor"), b"}t"
    return head * depth + b")" + tail * depth


BOMBS: dict[str, bytes] = {
    "memo index of 2**32": pickle_of(b"Nr" + b"\xff" * 4),
    "deep tuple as key": pickle_of(b"}" + deep_tuple(100_000) + b"Ns"),
    "deep tuple as member": pickle_of(b"\x8f(" + deep_tuple(100_000) + b"\x90"),
    "doubled tuple as key": pickle_of(b"})" + b"2\x86" * 60 + b"Ns"),
    "doubled frozensets": pickle_of(b"(" * 70 + b")" + b"2\x91" * 70),
    "wide tuple as key": pickle_of(b"}(" + b"N" * 10**5 + b"tNs"),
    "doubled stands as key": pickle_of(
        b"}" + named("a.B") + b"q\x000)" + b"2\x86q\x010h\x00h\x01R" * 60 + b"Ns"
    ),
    "encode again and again": pickle_of(
        text("x" * 10**6)
        + b"q\x000"
        + text("latin1")
        + b"q\x010"
        + named("_codecs.encode")
        + b"q\x020]("
        + b"h\x02h\x00h\x01\x86R" * 1000
        + b"e"
    ),
    "sets again and again": pickle_of(
        b"]("
        + b"N" * 10**5
        + b"eq\x000"
        + named("builtins.set")
        + b"q\x010]("
        + b"h\x01h\x00\x85R" * 1000
        + b"e"
    ),
    "counters again and again": pickle_of(
        b"}("
        + b"".join(b"M" + bytes([n % 256, n // 256]) + b"N" for n in range(10**4))
        + b"uq\x000"
        + named("collections.Counter")
        + b"q\x010]("
        + b"h\x01h\x00\x85R" * 10**4
        + b"e"
    ),
    "deques again and again": pickle_of(
        b"]("
        + b"N" * 10**5
        + b"eq\x000"
        + named("collections.deque")
        + b"q\x010]("
        + b"h\x01h\x00\x85R" * 1000
        + b"e"
    ),
    "doubled tuple in an error's text, inside an OrderedDict": pickle_of(
        named("torch.Size") + call("collections.OrderedDict") + b"N)" + b"2\x86" * 60 + b"s\x85R"
    ),
    "doubled tuple in an error's text, inside a Counter": pickle_of(
        named("torch.Size")
        + call("collections.Counter", b"}N)" + b"2\x86" * 60 + b"s\x85")
        + b"\x85R"
    ),
    "doubled tuple in an error's text, inside a deque": pickle_of(
        named("torch.Size") + call("collections.deque") + b")" + b"2\x86" * 60 + b"a\x85R"
    ),
    "paths again and again": pickle_of(
        text("x" * 10**6)
        + b"q\x000"
        + named("pathlib.PosixPath")
        + b"q\x010]("
        + b"h\x01h\x00\x85R" * 1000
        + b"e"
    ),
    "equal stands with doubled states": pickle_of(
        b"}("
        + (named("a.B") + b")R" + dict_of(text("x"), b")" + b"2\x86" * 60) + BUILD + NONE) * 2
        + b"u"
    ),
    "nested calls": pickle_of(named(FROM_TYPE) + nested_calls(5000) + b"R"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_pickles_take_little_time_and_memory(name: str) -> None:
    start = time.perf_counter()
    tracemalloc.start()
    try:
        loads(BOMBS[name], file="x", allow=AllowedClasses(frozenset({"a.B"})))
    except UcpError:
        refused = True
    else:
        refused = False
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused or name in ("memo index of 2**32",)
    assert peak_bytes < 100 * 2**20 and time.perf_counter() - start < 20


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(DamagedFileError, match="larger"):
        loads(pickle_of(b"N" * 20), file="x")
    monkeypatch.setattr(safe_pickle, "MAX_PICKLE_BYTES", 100)
    monkeypatch.setattr(safe_pickle, "MAX_OPERATIONS", 10)
    with pytest.raises(DamagedFileError, match="operations"):
        loads(pickle_of(b"N0" * 20 + b"N"), file="x")


# ---- fuzz ----


def _valid() -> dict[str, bytes]:

    buffer = io.BytesIO()
    torch.save(
        {
            "module": torch.nn.Linear(3, 4).state_dict(),
            "shapes": [OrderedDict(w=torch.Size([2, 3]))],
            "step": 7,
            "dtype": torch.float16,
            "args": {"a": (1, 2.5, None, True, "text"), "s": {1, 2}, "b": b"\xff\0"},
        },
        buffer,
    )
    with zipfile.ZipFile(buffer) as archive:
        torch_pickle = archive.read("archive/data.pkl")
    plain = {
        "k": [1, {"x": (b"ab", bytearray(b"c"), frozenset({2}))}, range(3), 2**70, 1.5, 1 + 2j]
    }
    return {
        "torch": torch_pickle,
        **{f"protocol {p}": pickle.dumps(plain, p) for p in (2, 3, 4, 5)},
    }


VALID = _valid()


def _only_named_errors(run: Callable[[], object]) -> None:
    with watch() as events:
        try:
            run()
        except UcpError as error:
            assert str(error)
    assert not events


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(VALID)), st.integers(0, 2**64))
def test_mutations_raise_only_named_errors_and_run_nothing(name: str, seed: int) -> None:
    _only_named_errors(lambda: loads(mutated(VALID[name], seed), file="x"))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"(",
                b"t",
                b")",
                b"}",
                b"]",
                b"\x8f",
                b"\x85",
                b"\x86",
                b"R",
                b"b",
                b"\x81",
                b"\x92",
                b"u",
                b"e",
                b"s",
                b"a",
                b"\x90",
                b"\x91",
                b"2",
                b"0",
                b"1",
                b"q\x00",
                b"h\x00",
                b"Q",
                b"N",
                b"K\x05",
                b"\x93",
                b"d",
                b"l",
                text("x"),
                text("0"),
                numbers(2, 3),
                storage(),
                named("torch._utils._rebuild_tensor_v2"),
                named("collections.OrderedDict"),
                named("argparse.Namespace"),
                named("numpy.dtype"),
                named("torch.Size"),
                named("builtins.getattr"),
                named("builtins.set"),
                named("torch.Tensor"),
                tensor(storage(), 0, numbers(2), numbers(1)),
                call("numpy.dtype", tuple_of(text("f4"), b"\x89", b"\x88")),
            ]
        ),
        max_size=40,
    )
)
def test_random_programs_raise_only_named_errors_and_run_nothing(program: list[bytes]) -> None:
    _only_named_errors(lambda: loads(pickle_of(b"".join(program)), file="x"))
