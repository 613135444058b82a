"""`paceline bench --part handoff`: one target and one drafter as two processes, over NCCL or gloo.

PYTHONPATH=src python benchmarks/handoff.py --geometry qwen3-8b --out benchmarks/records/handoff.json
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--part", "handoff", *sys.argv[1:]]))
