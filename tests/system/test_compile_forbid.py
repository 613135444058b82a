"""After the warm-up: every new shape is an error, a lazily compiled backward is caught, flex never runs dense."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from paceline.compiling import counters, guard, settings
from paceline.compiling.cache import CompileCache
from paceline.compiling.fingerprint import take
from paceline.compiling.forbid import CompiledAfterWarmup, DenseFlexAttention, Forbidden, dense_flex_raises, forbid
from paceline.compiling.warmup import Role, WarmPart, warm_up

sys.path.insert(0, str(Path(__file__).parent / "repro"))
from fast_cpu import have_compiler, skip_probes


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    before = settings.settings()
    yield
    settings.apply_settings(before)
    torch._dynamo.reset()
    guard.uninstall()


@pytest.fixture
def forbidding() -> Iterator[Callable[[], Forbidden]]:
    made: list[Forbidden] = []

    def start() -> Forbidden:
        made.append(forbid())
        return made[-1]

    yield start
    for forbidden in made:
        forbidden.lift()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(x).relu())).square().mean()


class Trainer:
    """A step and an evaluation of one compiled module, as training runs them."""

    def __init__(self) -> None:
        self.module = Tiny()
        self.compiled = torch.compile(self.module, backend="aot_eager", dynamic=False)
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def step(self, rows: int = 4) -> None:
        self.module.train()
        self.compiled(torch.randn(rows, 8)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.module.eval()
        with torch.no_grad():
            self.compiled(torch.randn(4, 8))

    def parts(self) -> list[WarmPart]:
        state = (self.module, self.optimizer)
        return [WarmPart("step", self.step, state), WarmPart("evaluation", self.evaluate, state)]


def warmed(trainer: Trainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by activate, restored after the test")
    monkeypatch.setenv("TRITON_CACHE_DIR", "likewise")
    warm_up(trainer.parts(), CompileCache(root, take(modules=())), Role(leader=True), lambda _: None, lambda _: None)


def test_two_hundred_steps_and_evaluations_compile_nothing(
    forbidding: Callable[[], Forbidden], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    warmed(trainer, tmp_path, monkeypatch)
    forbidden, traces = forbidding(), guard.traces()
    assert traces > 0
    for step in range(200):
        guard.check(f"step {step}")
        with forbidden.explain(f"step {step}"):
            trainer.step()
            if step % 20 == 0:
                trainer.evaluate()
        forbidden.check(f"step {step}")
    assert forbidden.compilations() == counters.Counters()
    assert guard.traces() == traces


def test_twenty_shapes_are_twenty_errors_and_no_compilation(
    forbidding: Callable[[], Forbidden], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    warmed(trainer, tmp_path, monkeypatch)
    forbidden = forbidding()
    for rows in range(5, 25):
        with pytest.raises(CompiledAfterWarmup) as caught, forbidden.explain(f"step {rows}"):
            trainer.step(rows)
        assert str(caught.value).startswith(f"step {rows}: forward (")
        assert any("expected 4" in reason and f"actual {rows}" in reason for reason in caught.value.reasons)
        forbidden.check(f"step {rows}")
    assert forbidden.compilations() == counters.Counters()
    with forbidden.explain("step 25"):
        trainer.step()  # the run's own shape still runs


def test_gradient_mode_is_a_guard_like_a_shape(
    forbidding: Callable[[], Forbidden], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    warmed(trainer, tmp_path, monkeypatch)
    forbidden = forbidding()
    trainer.module.train()
    with pytest.raises(CompiledAfterWarmup, match="guard failed"), forbidden.explain("step 3"), torch.no_grad():
        trainer.compiled(torch.randn(4, 8))


def test_an_error_of_the_step_itself_passes_unchanged(forbidding: Callable[[], Forbidden]) -> None:
    forbidden = forbidding()
    with pytest.raises(RuntimeError, match="ours"), forbidden.explain("step 1"):
        raise RuntimeError("ours")


def lazy_backward(backend: str) -> torch.Tensor:
    """A loss whose forward is compiled and whose backward is not yet."""
    x = torch.ones(4, requires_grad=True)
    return torch.compile(lambda x: x.sin().sum(), backend=backend, dynamic=False)(x)


def test_a_backward_compiled_after_the_stance_is_caught_and_named(forbidding: Callable[[], Forbidden]) -> None:
    loss = lazy_backward("aot_eager")
    forbidden = forbidding()
    with forbidden.explain("step 1"):
        loss.backward()  # the stance lets it through
    with pytest.raises(CompiledAfterWarmup, match="a backward, compiled lazily") as caught:
        forbidden.check("step 1")
    assert Path(__file__).name in str(caught.value)
    forbidden.check("step 2")


@pytest.mark.skipif(not have_compiler(), reason="Inductor needs g++ to compile for the CPU")
def test_the_counters_alone_catch_it_too(
    forbidding: Callable[[], Forbidden], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.callback import callback_handler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    skip_probes(monkeypatch.setattr)
    loss = lazy_backward("inductor")
    forbidden = forbidding()
    callback_handler.start_callbacks.clear()
    loss.backward()
    with pytest.raises(CompiledAfterWarmup, match=r"fxgraph_cache_miss \+1"):
        forbidden.check("step 1")


def flex_inputs(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(1, 2, tokens, 16) for _ in range(3)], torch.tril(torch.ones(tokens, tokens, dtype=torch.bool))


def test_flex_attention_called_uncompiled_raises_and_dense_sdpa_does_not() -> None:
    (q, k, v), causal = flex_inputs(128)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    undo = dense_flex_raises()
    try:
        with pytest.raises(DenseFlexAttention, match=r"\[1, 2, 128, 128\]"):
            flex_attention(q, k, v, block_mask=mask)
        oracle = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal)
    finally:
        undo()
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), oracle)


def test_flex_attention_past_the_recompile_limit_raises_instead_of_running_dense() -> None:
    settings.apply_settings(settings.DynamoSettings(recompile_limit=2, fail_on_recompile_limit_hit=False))

    def fused(_: object, __: object) -> Callable[..., tuple[torch.Tensor]]:
        """Stands for a back end that has a kernel: it holds no scores."""
        return lambda *inputs: (inputs[0],)

    lossy = torch.compile(flex_attention, backend=fused, dynamic=False)
    undo = dense_flex_raises()
    try:
        errors = [flex_error(lossy, tokens) for tokens in (16, 32, 48, 64)]
    finally:
        undo()
    assert errors[:2] == [None, None]
    assert [type(error) for error in errors[2:]] == [DenseFlexAttention] * 2


def flex_error(attend: Callable[..., torch.Tensor], tokens: int) -> Exception | None:
    (q, k, v), _ = flex_inputs(tokens)
    try:
        attend(q, k, v)
    except RuntimeError as error:
        return error
    return None


def seen_in_thread(action: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join(60)
    return found[0]


def test_settings_hold_in_worker_threads_and_in_their_backward() -> None:
    wanted = settings.DynamoSettings(recompile_limit=33)
    settings.apply_settings(wanted)

    class Look(torch.autograd.Function):
        seen: settings.DynamoSettings | None = None

        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            Look.seen = settings.settings()
            return gradient

    def backward() -> settings.DynamoSettings | None:
        Look.apply(torch.ones(1, requires_grad=True)).sum().backward()
        return Look.seen

    assert settings.settings() == wanted
    assert seen_in_thread(settings.settings) == wanted
    assert seen_in_thread(backward) == wanted


def test_more_shapes_than_torchs_own_limit_compile_in_a_worker_thread() -> None:
    settings.apply_settings()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    def ten_shapes() -> int:
        before = counters.read()
        for rows in range(2, 12):
            compiled(torch.ones(rows))
        return (counters.read() - before).graphs

    assert seen_in_thread(ten_shapes) == 10
