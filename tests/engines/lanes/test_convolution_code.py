"""What the compiler makes of the convolutions' kernels. Needs Triton, but no GPU."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled with TRITON_INTERPRET=1", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from protofed.engines.lanes import convolution_kernels as kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = {"CI": 128, "CO": 128, "NB": 1, "BH": 8}
MAP, MATRIX, WEIGHT = [1, 8, 16, 64], [128, 128], [64, 128]
STRIDED = [1, 8, 1, 16, 64]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "convolve": (
        {"x_d": STRIDED, "w_d": [128, 64], "y_d": MATRIX, "part_": "*fp32", "R": "i32"},
        {"STRIDE": 2, "TAPS": 9, "HO": 16, "WO": 16, "COLUMNS": 128, "DEPTH": 64},
    ),
    "input_gradient": (
        {
            "g_d": MAP,
            "w_d": WEIGHT,
            "dx_d": MATRIX,
            "add_d": MATRIX,
            "y_d": MATRIX,
            "x_d": MATRIX,
            "mean_": "*fp32",
            "scale_": "*fp32",
            "part_": "*fp32",
        },
        {"H": 16, "W": 16, "COLUMNS": 128, "DEPTH": 64, "ADD": True, "NORM": True},
    ),
    "strided_input_gradient": (
        {"g_d": MAP, "w_d": WEIGHT, "g1_d": MAP, "w1_d": WEIGHT, "dx_d": [1, 8, 1, 16, 128]},
        {"HO": 16, "WO": 16, "COLUMNS": 128, "DEPTH": 64},
    ),
    "weight_gradient": (
        {"x_d": [1, 4, 1, 16, 128], "g_d": [64, 128], "dw_": "*fp32", "N": "i32"},
        {"STRIDE": 1, "TAPS": 9, "HO": 16, "WO": 16, "BH": 4, "IN": 128, "OUT": 128, "PARTS": 7},
    ),
}


@pytest.mark.parametrize("kernel", CASES)
def test_tensor_cores_are_waited_for_before_registers_are_loaded_again(kernel: str) -> None:
    """See ``_finished``: with products still under way, the next box may overwrite their input."""
    inputs, sizes = CASES[kernel]
    sizes = {**SIZES, **sizes}
    signature = {
        name: f"tensordesc<bf16{kind}>" if isinstance(kind, list) else kind
        for name, kind in inputs.items()
    }
    source = ASTSource(
        getattr(kernels, kernel), {**signature, **dict.fromkeys(sizes, "constexpr")}, sizes
    )
    options = {"num_warps": 4 if kernel == "weight_gradient" else 8, "num_stages": 4}
    code = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    assert "wgmma.mma_async" in code and "cp.async.bulk.tensor" in code
    pending = re.findall(r"wgmma.wait_group.sync.aligned (\d+)", code)
    assert pending and set(pending) == {"0"}
