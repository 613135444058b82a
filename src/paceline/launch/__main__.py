"""`python -m paceline.launch ORDER`: a worker of a local world."""

import os
import sys

from paceline.launch.worker import main

status = main(sys.argv[1])
sys.stdout.flush()
sys.stderr.flush()
if status:
    # Threads of a broken group may hang in native code: do not wait for them.
    os._exit(status)
