"""What was compiled in this process so far, by torch's own counters and the guard's."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch._dynamo.utils import counters as torch_counters

from paceline.compiling import guard

_SOURCES = {
    "graphs": ("stats", "unique_graphs"),
    "frames": ("frames", "total"),
    "fxgraph_cache_hit": ("inductor", "fxgraph_cache_hit"),
    "fxgraph_cache_miss": ("inductor", "fxgraph_cache_miss"),
    "fxgraph_cache_bypass": ("inductor", "fxgraph_cache_bypass"),
    "autograd_cache_hit": ("aot_autograd", "autograd_cache_hit"),
    "autograd_cache_miss": ("aot_autograd", "autograd_cache_miss"),
    "autograd_cache_bypass": ("aot_autograd", "autograd_cache_bypass"),
}


@dataclass(frozen=True)
class Counters:
    """Totals since the process started; the difference of two says what lay between."""

    graphs: int = 0
    """Graphs that Dynamo captured, whether their code came from the cache or not."""
    frames: int = 0
    fxgraph_cache_hit: int = 0
    fxgraph_cache_miss: int = 0
    fxgraph_cache_bypass: int = 0
    autograd_cache_hit: int = 0
    autograd_cache_miss: int = 0
    autograd_cache_bypass: int = 0
    traces: int = 0
    """Calls of ``Tracer.trace``, if the guard is installed. 0 proves that a start was warm."""

    @property
    def compiled(self) -> int:
        """Graphs for which code was generated here: those that no cache had."""
        return self.fxgraph_cache_miss + self.fxgraph_cache_bypass

    @property
    def loaded(self) -> int:
        """Graphs whose code came from the cache. An entry of the autograd cache may bring its graphs with it."""
        return max(self.autograd_cache_hit, self.fxgraph_cache_hit)

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: value - before[name] for name, value in asdict(self).items()})

    def __str__(self) -> str:
        moved = [f"{name} +{value}" for name, value in asdict(self).items() if value]
        return ", ".join(moved) or "nothing"


def read() -> Counters:
    """The totals now. A few microseconds."""
    values = {name: torch_counters[group][key] for name, (group, key) in _SOURCES.items()}
    return Counters(**values, traces=guard.traces())
