"""Keeps Inductor's CPU compiles short in tests."""

import shutil

import torch


def have_compiler() -> bool:
    return shutil.which("g++") is not None


def skip_probes() -> None:
    """Use the vector instructions that torch reports; Inductor compiles a probe for each kind otherwise."""
    import torch._inductor.cpu_vec_isa as vectors

    torch.set_num_threads(1)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        vectors.VecAVX2.__bool__ = lambda _: True
        vectors.valid_vec_isa_list = lambda: [vectors.VecAVX2()]
