"""What the compiler makes of the prototypes' kernels. Needs Triton, but no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled with TRITON_INTERPRET=1", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from protofed.engines.lanes import prototype_kernels as kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
LOSS = {"z_": "*bf16", "y_": "*i64", "mean_": "*fp32", "mask_": "*fp32", "loss_": "*fp32",
        "dz_": "*fp32", "d": "i32"}  # fmt: skip
CONTRAST = {"POWER": 1.0, "NO_LENGTH": 1e-24, "ABSENT": -1e30, "GRADIENT": True}
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "contrast": (
        {**LOSS, "N": "i32", "J": "i32", "scale": "fp32"},
        {**CONTRAST, "ROWS": 8, "OWN": 8, "D": 512},
    ),
    "consistency": ({**LOSS, "mask_": "*u8", "scale": "fp32"}, {"GRADIENT": True, "BLOCK": 512}),
    "per_class_mean": (
        {"mean_": "*fp32", "mask_": "*fp32", "out_": "*fp32", "there_": "*fp32", "d": "i32",
         "J": "i32"},
        {"ROWS": 16, "BLOCK": 64},
    ),
    "mixed_class_means": (
        {"z_": "*bf16", "y_": "*i64", "gamma_": "*fp32", "score_": "*fp32", "mean_": "*fp32",
         "there_": "*u8", "B": "i32", "d": "i32"},
        {"ROWS": 64, "OTHERS": 64, "BLOCK": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", CASES)
def test_sums_have_a_fixed_order(kernel: str) -> None:
    inputs, sizes = CASES[kernel]
    source = ASTSource(
        getattr(kernels, kernel), {**inputs, **dict.fromkeys(sizes, "constexpr")}, sizes
    )
    code = triton.compile(source, target=HOPPER, options={"num_warps": 8}).asm["ptx"]
    assert "st.global" in code
    assert not any(word in code for word in ("atom.", "red.global", ".local"))
