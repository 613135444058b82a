"""How far a regeneration is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counts finished rows and says so every few seconds."""

    total: int
    report: Callable[[str], None]
    every: float = 5.0
    done: int = 0
    tokens: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    _started: float = field(default_factory=time.monotonic)
    _said: float = 0.0

    def add(self, tokens: int, flags: Iterable[str]) -> None:
        self.done += 1
        self.tokens += tokens
        self.flags.update(flags)
        now = time.monotonic()
        if now - self._said >= self.every or self.done == self.total:
            self._said = now
            self.report(self.line(now - self._started))

    def line(self, seconds: float) -> str:
        left = seconds * (self.total - self.done) / max(1, self.done)
        flagged = "".join(f", {count} {flag}" for flag, count in sorted(self.flags.items()))
        rate = self.tokens / max(seconds, 1e-9)
        return f"regenerate: {self.done:,} of {self.total:,} rows, {rate:,.0f} tokens/s, {_clock(left)} left{flagged}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
