"""Tiny models run fastest on one thread, and several threads of several test processes only wait for each other.

Set before torch is imported, so that the processes that tests start have it too.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
