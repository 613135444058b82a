"""A part of the work, timed as one JSON record, with this machine's ceilings beside it.

Shares of peak are counted operations over measured seconds over the rate that a large matrix product reached in the
same process. Each part is a module with a `measure(case)`; `options.PARTS` lists them.
"""

from paceline.bench.command import compare, run_bench
from paceline.bench.drafter import StepBench, count_operations
from paceline.bench.geometry import GEOMETRIES, synthetic_batch
from paceline.bench.measuring import Ceilings, ceilings, machine, seconds
from paceline.bench.options import BenchOptions

__all__ = [
    "GEOMETRIES",
    "BenchOptions",
    "Ceilings",
    "StepBench",
    "ceilings",
    "compare",
    "count_operations",
    "machine",
    "run_bench",
    "seconds",
    "synthetic_batch",
]
