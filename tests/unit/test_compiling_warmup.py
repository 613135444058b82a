"""The warm-up's own logic: states restored bit for bit, roles, the lock, barriers that name who is missing."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from paceline.compiling import guard, settings
from paceline.compiling.cache import CompileCache
from paceline.compiling.fingerprint import Fingerprint
from paceline.compiling.snapshot import snapshot
from paceline.compiling.warmup import PhaseReport, Role, WarmPart, warm_up
from paceline.errors import UserError

HERE = Fingerprint("2.13.0", "none", "none", "none", "none", "x86_64", "3.11", "abc")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    before = settings.settings()
    yield
    guard.uninstall()
    settings.apply_settings(before)


class Net(nn.Module):
    """Parameters, buffers, and layers that draw from the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Counter:
    """State behind `state` and `load_state`, as Paceline's optimiser has it."""

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.count.copy_(tensors["count"])


def random_draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_on_as_if_the_warm_up_had_not_been(
    steps_before: int, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> None:
    results = [trained(steps_before, optimizer_class, disturb) for disturb in (False, True)]
    for undisturbed, disturbed in zip(*results, strict=True):
        assert torch.equal(undisturbed, disturbed)


def trained(steps_before: int, optimizer_class: Callable[..., torch.optim.Optimizer], disturb: bool) -> list[Tensor]:
    torch.manual_seed(3)
    net = Net()
    optimizer = optimizer_class(net.parameters(), lr=0.1)
    addresses = [parameter.data_ptr() for parameter in net.parameters()]

    def step() -> None:
        net(torch.randn(8, 4)).backward()
        optimizer.step()

    for _ in range(steps_before):
        step()
    if disturb:
        restore = snapshot([net, optimizer])
        net.eval()
        step()
        step()
        optimizer.zero_grad()
        restore()
    for _ in range(2):
        step()
    assert [parameter.data_ptr() for parameter in net.parameters()] == addresses
    assert net.training
    return [
        *net.state_dict().values(),
        *(parameter.grad for parameter in net.parameters() if parameter.grad is not None),
    ]


def test_random_states_generators_and_own_states_come_back() -> None:
    generator, counter = torch.Generator().manual_seed(5), Counter()
    restore = snapshot([generator, counter])
    first = [*random_draws(), float(torch.rand((), generator=generator))]
    counter.count += 1
    restore()
    assert [*random_draws(), float(torch.rand((), generator=generator))] == first
    assert counter.count == 0


def test_gradients_that_were_there_stay_and_new_ones_go() -> None:
    layer = nn.Linear(2, 2, bias=False)
    restore = snapshot([layer])
    layer(torch.ones(1, 2)).sum().backward()
    restore()
    assert layer.weight.grad is None
    layer.weight.grad = torch.full((2, 2), 7.0)
    restore = snapshot([layer])
    layer(torch.ones(1, 2)).sum().backward()
    restore()
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 7.0))


def test_what_cannot_be_restored_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot restore dict"):
        snapshot([{}])  # type: ignore[list-item]


def test_a_part_that_fails_is_restored_all_the_same(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()

    def run() -> None:
        nn.init.zeros_(layer.weight)
        raise ValueError("in the part")

    cache = CompileCache(tmp_path, HERE)
    with pytest.raises(ValueError, match="in the part"):
        warm_up([WarmPart("step", run, [layer])], cache, Role(True), nothing, nothing)
    assert torch.equal(layer.weight, before)
    assert cache.condition() == "cold"
    assert cache.holder() is None


def nothing(_: object) -> None:
    pass


def test_the_phases_are_told_in_order_and_the_cache_is_finished(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, HERE)
    told: list[str] = []
    met: list[str] = []

    def report(phase: PhaseReport) -> None:
        told.append(phase.name)

    parts = [WarmPart("step", lambda: None, signature="tokens=128"), WarmPart("evaluation", lambda: None)]
    outcome = warm_up(parts, cache, Role(True, "rank 0"), met.append, report)
    assert told == [
        "lock of the compile cache",
        "check of the compile cache",
        "warm-up of step",
        "warm-up of evaluation",
        "meeting the other workers",
        "warm-up of every worker",
    ]
    assert met == ["warm-up: leader is done", "warm-up: everyone is done"]
    assert [part.name for part in outcome.parts] == ["step", "evaluation"]
    assert cache.holds(["step tokens=128", "evaluation"])
    assert not cache.holds(["step tokens=256"])


def test_a_follower_of_a_finished_cache_repairs_nothing_and_one_of_an_unfinished_compiles(tmp_path: Path) -> None:
    parts = [WarmPart("step", lambda: None)]
    assert "is empty" in warm_up(parts, CompileCache(tmp_path, HERE), Role(False), nothing, nothing).repair
    assert warm_up(parts, CompileCache(tmp_path, HERE), Role(False), nothing, nothing).repair == ""


def test_a_barrier_that_fails_names_who_holds_the_lock(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, HERE)

    def barrier(_: str) -> None:
        raise TimeoutError("60 s are over")

    with (
        cache.lock("rank 0 of another launch"),
        pytest.raises(UserError, match=r"60 s are over; .* held by rank 0 of another"),
    ):
        warm_up([], cache, Role(False, "rank 1"), barrier, nothing)


def test_a_lock_that_is_not_let_go_names_its_holder(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, HERE)
    with cache.lock("rank 0 of another launch"), pytest.raises(UserError, match="held by rank 0 of another launch"):
        warm_up([], cache, Role(True, "rank 0", wait_seconds=0.0), nothing, nothing)


# -- a full disk -------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))


def test_a_warm_up_that_finds_the_disk_full_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers die of it in many ways: by an error of their own that names it, or by one that does not."""

    def run() -> None:
        raise RuntimeError("CppCompileError: cannot write: No space left on device")

    def other() -> None:
        raise RuntimeError("ld terminated with signal 7")

    with pytest.raises(UserError, match=r"cannot write the compile cache .*: No space left on device"):
        warm_up([WarmPart("step", run)], CompileCache(tmp_path, HERE), Role(True), nothing, nothing)
    with pytest.raises(RuntimeError, match="ld terminated"):
        warm_up([WarmPart("step", other)], CompileCache(tmp_path, HERE), Role(True), nothing, nothing)
    full_disk(monkeypatch)
    with pytest.raises(UserError, match="make room there"):
        warm_up([WarmPart("step", other)], CompileCache(tmp_path, HERE), Role(True), nothing, nothing)


def test_a_warm_start_writes_no_record_anew_and_so_needs_no_room(tmp_path: Path) -> None:
    parts = [WarmPart("step", lambda: None)]
    warm_up(parts, CompileCache(tmp_path, HERE), Role(True), nothing, nothing)
    record = CompileCache(tmp_path, HERE).folder / "manifest.json"
    (record.parent / "manifest.json.half").mkdir()  # nothing can be written there
    before = record.read_bytes()
    assert warm_up(parts, CompileCache(tmp_path, HERE), Role(True), nothing, nothing).warnings == ()
    assert record.read_bytes() == before
    more = [*parts, WarmPart("evaluation", lambda: None)]
    (said,) = warm_up(more, CompileCache(tmp_path, HERE), Role(True), nothing, nothing).warnings
    assert "the warm-up cannot be recorded" in said


def test_what_was_compiled_on_a_full_disk_is_not_trusted_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path, HERE)
    cache.activate()
    cache.repair()
    full_disk(monkeypatch)
    assert "may not have been kept" in (cache.finish(["step"], 1.0) or "")
    assert cache.finish(["step"]) is None


@pytest.mark.parametrize("whole", [True, False], ids=["deleted", "cut"])
def test_a_cache_that_is_spoilt_under_a_warm_up_is_blamed_for_its_failure(tmp_path: Path, whole: bool) -> None:
    parts = [WarmPart("step", lambda: None)]
    cache = CompileCache(tmp_path, HERE)
    cache.activate()
    module = cache.compiled[0] / "ab" / "cab.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    warm_up(parts, cache, Role(True), nothing, nothing)

    def run() -> None:
        if whole:
            shutil.rmtree(tmp_path)
        else:
            module.write_text("x =")
        raise RuntimeError("Failed to import cab")

    with pytest.raises(UserError, match=r"was deleted|was changed \(inductor/ab/cab.py: cut or changed"):
        warm_up([WarmPart("step", run)], CompileCache(tmp_path, HERE), Role(True), nothing, nothing)


def test_a_failure_that_is_not_the_caches_is_left_as_it_is(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, HERE)

    def run() -> None:
        (cache.compiled[0] / "half.so").write_bytes(b"")  # what a compiler that failed leaves
        raise RuntimeError("g++: internal compiler error")

    with pytest.raises(RuntimeError, match="internal compiler error"):
        warm_up([WarmPart("step", run)], cache, Role(True), nothing, nothing)
