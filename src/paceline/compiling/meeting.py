"""A barrier for the warm-up: it may take minutes, so it is no collective, which a watchdog would kill."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.errors import UserError


def store_barrier(store: Store, rank: int, world: int, seconds: float) -> Callable[[str], None]:
    """The `barrier` that `warm_up` wants, over a torch store (TCP, file or hash).

    Args:
        store: one that no earlier launch met in (a ``PrefixStore`` named for the launch, under restarts).
        seconds: how long one meeting may take.

    Raises (when it is called):
        UserError: some ranks did not come in time; names them.
    """

    def meet(phase: str) -> None:
        keys = [f"meeting/{phase}/{other}" for other in range(world)]
        store.set(keys[rank], "here")
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # DistStoreError, which not every torch exports
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            raise UserError(
                f"ranks {absent} did not come to {phase!r} within {seconds:.0f} s",
                "see what they do (paceline doctor RUN_DIR), or raise compiling.warmup_seconds",
            ) from error

    return meet
