"""The numbers of a step leave the device one step late: adding them up asks it for nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.drafter.objective import Sums
from paceline.training.optimizer import StepReport
from paceline.training.tally import Tally

_WAITS = {"new_tensor", "tensor", "as_tensor", "item", "tolist", "cpu", "numpy", "nonzero"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "index")
}


class NoWait(TorchFunctionMode):
    """Refuses what makes a host wait for a GPU, or copies a host's numbers to it with a wait."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def tally(delivered: list[dict[str, Any]]) -> Tally:
    run: Any = SimpleNamespace(
        setup=SimpleNamespace(batch=SimpleNamespace(block_size=3)),
        config=SimpleNamespace(training=SimpleNamespace(global_batch=2)),
    )
    return Tally(run, SimpleNamespace(record_step=delivered.append), None)  # type: ignore[arg-type]


def sums(loss: float) -> Sums:
    return Sums(torch.tensor(loss), torch.tensor(2.0), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 2.0, 1.0]))


def test_a_step_is_added_up_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[dict[str, Any]] = []
    it = tally(delivered)
    put: list[Tensor] = []
    monkeypatch.setattr(it._delayed, "put", lambda step, values, facts: put.append(values))
    tokens: Any = [SimpleNamespace(index=index, documents=(0,), bounds=(0, 70 + index)) for index in (6, 7)]
    given = [sums(3.0), sums(5.0)]
    report = StepReport(grad_norm=torch.tensor(0.5), skipped=torch.tensor(False), learning_rate=1e-3)
    with NoWait():
        it.start()
        for batch, values in zip(tokens, given, strict=True):
            it.add(batch, values)
        it.finish(4, report, 0.0)
    assert put[0].tolist() == [8.0, 4.0, 0.0, 2.0, 0.0, 0.0, 4.0, 2.0, 0.0, 0.0, 153.0, 0.5, 0.0]


def test_the_record_of_a_step() -> None:
    delivered: list[dict[str, Any]] = []
    it = tally(delivered)
    tokens: Any = SimpleNamespace(index=6, documents=(0,), bounds=(0, 70))
    report = StepReport(grad_norm=torch.tensor(0.5), skipped=torch.tensor(False), learning_rate=1e-3)
    it.start()
    it.add(tokens, sums(3.0))
    it.finish(4, report, 0.25)
    assert not delivered
    it.flush()
    (record,) = delivered
    assert (record["step"], record["loss"], record["tokens"], record["labels"]) == (4, 1.5, 70, 3)
    assert record["accuracy"] == [0.5, 0.0]
    assert record["waited"] == 0.25
