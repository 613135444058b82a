"""A writer that is killed leaves a whole drafter or none, never half of one."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from paceline import export

# The writer stops itself with SIGKILL at its n-th call of the file system, so that every place is tried without timing.
WRITER = """
    import os, signal, sys
    sys.path.insert(0, {unit!r})
    import torch
    from test_export_layout import SHAPE, state, target
    from paceline import export
    from paceline.export import files

    left = int(sys.argv[2])

    def counted(function):
        def call(*args, **kwargs):
            global left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)
        return call

    from paceline.export import folder as module
    module.save_file = counted(module.save_file)
    files.write_json = counted(files.write_json)
    files._sync = counted(files._sync)
    from pathlib import Path
    Path.rename = counted(Path.rename)
    files.shutil.rmtree = counted(files.shutil.rmtree)
    doubled = {{name: tensor * 2 for name, tensor in state().items()}}
    export.write(Path(sys.argv[1]), doubled, SHAPE, target(), dtype="float32")
    print("written")
"""


def test_killed_at_every_call(tmp_path: Path):
    unit = Path(__file__).parents[1] / "unit"
    sys.path.insert(0, str(unit))
    from test_export_layout import SHAPE, state, target

    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER.format(unit=str(unit))))
    folder = tmp_path / "out" / "drafter"
    outcomes = []
    for calls in range(1, 20, 2):
        export.write(folder, state(), SHAPE, target(), dtype="float32")  # also clears what the last kill left
        assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
        done = subprocess.run(
            [sys.executable, str(script), str(folder), str(calls)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if folder.exists():
            _, tensors = export.read(folder)
            factor = float(tensors["norm.weight"][0] / state()["norm.weight"][0])
            assert round(factor, 5) in (1.0, 2.0)
            outcomes.append(factor)
        if done.returncode == 0:
            break
    assert 1.0 in outcomes
    assert outcomes[-1] == 2.0
