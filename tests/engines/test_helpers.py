"""States of DeepSpeed's own helpers, layer dropping and curriculum learning: given back to the
helper of that name, or a note says that the engine has none."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ucp.engines.deepspeed.state import EngineState, _helpers

KEYS = ("random_ltd", "data_sampler")


class Helper:
    """Either of them, as DeepSpeed uses it."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def engine_with(*keys: str) -> tuple[Any, dict[str, Helper]]:
    made = {key: Helper(0) for key in keys}
    engine = SimpleNamespace(
        random_ltd_enabled=lambda: "random_ltd" in made,
        random_ltd_scheduler=made.get("random_ltd"),
        curriculum_learning_enabled=lambda: "data_sampler" in made,
        training_dataloader=SimpleNamespace(data_sampler=made.get("data_sampler")),
    )
    return engine, made


@pytest.mark.parametrize("live", [(), KEYS[:1], KEYS[1:], KEYS], ids=str)
def test_each_helper_gets_its_state_or_a_note(live: tuple[str, ...]) -> None:
    engine, made = engine_with(*live)
    saved = {key: {"seen": number} for number, key in enumerate(KEYS, 5)}
    common: Any = None
    state = EngineState(engine, None, common, False, None, saved, (1, 1), {}, False, True)
    notes = list[str]()
    state._restore_helpers(engine, notes)
    assert {key: one.state_dict() for key, one in made.items()} == {k: saved[k] for k in live}
    assert _helpers(engine) == {key: saved[key] for key in live}
    missing = [key for key in KEYS if key not in live]
    assert [key for key in KEYS if any(key in note for note in notes)] == missing
    assert len(notes) == len(missing)
