"""What an exported drafter consists of, recorded so that a later look can tell whether it is still that.

A file that is whole and a shape that fits say nothing of tensors that were swapped or zeroed, or of captured layers
that are all one off: both serve, with few accepted tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.fields import short
from paceline.shapes import DrafterShape


@dataclass(frozen=True)
class Contents:
    """Tensors by hash, and what of the configuration gives them their meaning."""

    sha256: str
    """Of the other two."""
    shape: dict[str, Any]
    """A DrafterShape and the tensors' dtype, as JSON has them."""
    tensors: dict[str, str]
    """SHA-256 of each tensor's bytes."""

    @property
    def whole(self) -> bool:
        """Whether the record itself is what it was."""
        return self.sha256 == _digest(self.shape, self.tensors)


def contents_of(shape: DrafterShape, tensors: Mapping[str, Tensor]) -> Contents:
    """Reads every byte once: about a second for each gigabyte."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    facts = json.loads(json.dumps(dataclasses.asdict(shape) | {"dtype": ", ".join(dtypes)}))
    hashes = {name: _hash(tensors[name]) for name in sorted(tensors)}
    return Contents(_digest(facts, hashes), facts, hashes)


def changes(then: Contents, now: Contents) -> list[str]:
    """What differs, in words; what only one of the two records (written by another version) is not compared."""
    both = [key for key in then.shape if key in now.shape]
    found = [
        f"{key.replace('_', ' ')} {short(now.shape[key])} instead of {short(then.shape[key])}"
        for key in both
        if now.shape[key] != then.shape[key]
    ]
    if now.shape.get("dtype") != then.shape.get("dtype"):
        return found  # then all bytes differ
    moved = [name for name, value in now.tensors.items() if value != then.tensors.get(name)]
    moved += sorted(then.tensors.keys() - now.tensors.keys())
    return [*found, _tensor_words(moved, then, now)] if moved else found


def _tensor_words(moved: Sequence[str], then: Contents, now: Contents) -> str:
    held = {value: name for name, value in then.tensors.items()}
    words = []
    for name in moved[:3]:
        source = held.get(now.tensors.get(name, ""), "")
        words.append(f"{name} (holds what was {source})" if source else name)
    rest = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
    return f"other values in {', '.join(words)}{rest}"


def _digest(shape: Mapping[str, Any], tensors: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([shape, tensors], sort_keys=True).encode()).hexdigest()


def _hash(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()
