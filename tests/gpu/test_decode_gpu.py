"""Decoding on a GPU: steps replayed from a CUDA graph are the eager steps."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
sys.path.append(str(Path(__file__).parents[1] / "numerics"))

from decode_world import drafter_shape, ends_of, grouped_prompts, make_drafter, make_target  # noqa: E402

from paceline.errors import UserError  # noqa: E402
from paceline.evaluation.decode import Engine, decode  # noqa: E402
from paceline.evaluation.sampling import Sampling  # noqa: E402
from paceline.evaluation.timing import step_times  # noqa: E402


def engine(family: str, dtype: torch.dtype) -> Engine:
    model = make_target(family).to("cuda", dtype)
    shape = drafter_shape(model)
    drafter = make_drafter(shape).to("cuda", dtype)
    return Engine(model, ends_of(model), drafter, shape, static=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_give_the_eager_tokens(family: str, dtype: torch.dtype):
    eager, prompts = engine(family, dtype), grouped_prompts(each=2)
    graphed = dataclasses.replace(eager, graphs=True)
    for limit in (1, 2, 40):
        wanted = decode(eager, prompts, limit, ()).answers
        assert decode(graphed, prompts, limit, ()).answers == wanted
        assert (
            decode(graphed.without_drafter(), prompts, limit, ()).answers
            == decode(eager.without_drafter(), prompts, limit, ()).answers
        )


def test_float32_is_lossless_on_the_gpu():
    made, prompts = engine("qwen3", torch.float32), grouped_prompts()
    drafted, plain = decode(made, prompts, 64, ()), decode(made.without_drafter(), prompts, 64, ())
    assert [a.tokens for a in drafted.answers] == [a.tokens for a in plain.answers]


def test_parts_are_timed_in_graphs():
    times = step_times(dataclasses.replace(engine("llama", torch.bfloat16), graphs=True), batch=4, context=32)
    assert times.plain > 0
    assert set(times.verify) == set(times.draft) == {2, 4, 6}


def test_sampling_in_graphs_is_refused():
    made = dataclasses.replace(engine("llama", torch.float32), graphs=True, sampling=Sampling(1.0))
    with pytest.raises(UserError, match="decode greedily"):
        decode(made, [[5, 6]], 8, ())
