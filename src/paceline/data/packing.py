"""Which documents share a row: best fit, longest first, from lengths alone. A pure function, made once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of item numbers; each row's lengths sum to at most `capacity`, and every item stands in exactly one row.

    Longest first, each into the fullest row that still takes it. Within a row, items keep the order of placing. Raises
    ValueError for an item that is longer than the capacity or empty.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not 1 <= int(sizes.min()) <= int(sizes.max()) <= capacity:
        raise ValueError(f"lengths must lie in 1 … {capacity}")
    rows: list[list[int]] = []
    free: list[list[int]] = [[] for _ in range(capacity + 1)]
    room = 0  # bit r is set where some row has exactly r free tokens: the fullest fitting row is the lowest bit
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = room >> size
        left = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            row = free[left].pop()
            if not free[left]:
                room &= ~(1 << left)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        left -= size
        free[left].append(row)
        room |= 1 << left
    return rows


def allot(eligible: Sequence[int], places: int) -> list[int]:
    """Share `places` among items in proportion to `eligible`, never more than an item has; largest remainders first."""
    total = sum(eligible)
    if total <= places:
        return list(eligible)
    exact = [places * count for count in eligible]
    shares = [value // total for value in exact]
    order = sorted(range(len(exact)), key=lambda item: (-(exact[item] % total), item))
    for item in order[: places - sum(shares)]:
        shares[item] += 1
    return shares
