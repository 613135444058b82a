"""`paceline bench --part target` for Qwen3-8B's shape: its packed forward, layers up to the last captured one.

python benchmarks/target_forward.py [--tokens 8192] [--float8] [any other flag of `paceline bench`]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from paceline.cli import main

if __name__ == "__main__":
    words = [word for given in sys.argv[1:] for word in (["--weights", "float8"] if given == "--float8" else [given])]
    sys.exit(main(["bench", "--part", "target", "--geometry", "qwen3-8b", *words]))
