"""Tests of kernels without a GPU: they run in Triton's interpreter, and are compiled for GPUs.

A file with such tests runs itself again with TRITON_INTERPRET=1, which counts when Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by another test of this file")
not_in_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="not in the interpreter")


def run_in_the_interpreter(file: str) -> None:
    """Run the tests of `file` that need the interpreter."""
    command = [sys.executable, "-m", "pytest", file]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert re.search(r"\d+ passed", ran.stdout), ran.stdout[-4000:]


def compiles(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    """Compile a kernel for two generations of GPUs. `types` are the types of its pointers. Other arguments are i32."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]
    from triton.compiler import compile as compiled  # type: ignore[import-not-found]

    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    for generation in (80, 90):
        source = ASTSource(kernel, signature, constexprs=dict(constants))
        made = compiled(source, target=GPUTarget("cuda", generation, 32))
        assert made.asm["cubin"]
        assert made.metadata.shared <= 99 * 1024, "the shared memory of a block on consumer cards"


@contextmanager
def products_as_on_a_gpu() -> Iterator[None]:
    """Mend the interpreter. It multiplies the bits of bfloat16 as integers, and cuts off what bfloat16 does not hold. A
    GPU rounds to the nearest number. NumPy's products round a row of a tile by its place in the tile on some CPUs. A
    GPU computes all rows alike."""
    import triton.language as tl  # type: ignore[import-not-found]
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # type: ignore[import-not-found]

    cast = InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *settings: Any) -> Any:
        rows, other = (_wide(x.data) if x.dtype == tl.bfloat16 else x.data for x in (a, b))
        product = np.concatenate([row[None] @ other for row in rows])
        return TensorHandle(product.astype(sums.data.dtype) + sums.data, sums.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(_narrow(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    with patch.multiple(InterpreterBuilder, create_dot=create_dot, create_fp_trunc=cast_impl):
        yield


def _narrow(data: np.ndarray) -> np.ndarray:
    """Return float32 numbers as bits of bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()


def _wide(data: np.ndarray) -> np.ndarray:
    """Return bits of bfloat16 as float32 numbers."""
    return (data.astype(np.uint32) << 16).view(np.float32)
