"""How long a target is busy: what lies inside the spans counts, what lies between them does not."""

from __future__ import annotations

import pytest
import torch

from paceline.pipeline.split import Spans


def test_only_what_is_inside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("paceline.pipeline.split.time.perf_counter", lambda: now[0])
    spans = Spans(torch.device("cpu"))
    assert spans.total() == 0.0
    for busy, idle in ((2.0, 5.0), (0.5, 1.0)):
        with spans:
            now[0] += busy
        now[0] += idle
    assert spans.total() == 2.5
