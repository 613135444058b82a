"""Keeps Inductor's CPU compiles short in tests."""

import shutil
from collections.abc import Callable

import torch


def have_compiler() -> bool:
    return shutil.which("g++") is not None


def skip_probes(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Use AVX2 where torch reports it; Inductor compiles a probe for each kind otherwise.

    For processes of their own. Another process must take the patch back (`patch` is its `monkeypatch.setattr`): with
    it, flex_attention's CPU kernel gives wrong numbers on machines that have more than AVX2.
    """
    import torch._inductor.cpu_vec_isa as vectors

    torch.set_num_threads(1)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        patch(vectors.VecAVX2, "__bool__", lambda _: True)
        patch(vectors, "valid_vec_isa_list", lambda: [vectors.VecAVX2()])
