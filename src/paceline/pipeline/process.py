"""Which process of a run this is. No torch here: a worker reads it before torch may be imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    attempt: int = 0
    """How many times the world was restarted before."""
    device: str = "cpu"
    """The only device that this process uses: `cpu`, or `cuda:0`, since each process sees one GPU."""

    @staticmethod
    def from_environment(device: str) -> World:
        """As torchrun, and our own launcher, tell their workers. Raises UserError when the variables are incomplete."""
        return World(
            rank=_number("RANK"),
            size=_number("WORLD_SIZE"),
            local_rank=_number("LOCAL_RANK"),
            local_size=_number("LOCAL_WORLD_SIZE", 1),
            node=_number("GROUP_RANK", 0),
            attempt=_number("PACELINE_ATTEMPT", _number("TORCHELASTIC_RESTART_COUNT", 0)),
            device=device,
        )

    @property
    def nodes(self) -> int:
        return -(-self.size // self.local_size)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(
            f"{name} = {text!r} in the environment is not a number", "start with paceline train or torchrun"
        )
    return int(text)
