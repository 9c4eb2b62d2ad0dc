"""What the compiler makes of the images' kernels. Needs Triton, but no GPU."""

from __future__ import annotations

import itertools
import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled with TRITON_INTERPRET=1", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from protofed.engines.lanes import image_kernels as kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(name: str, types: dict[str, str], sizes: dict[str, int], **options: object) -> str:
    types = {**types, **dict.fromkeys(sizes, "constexpr")}
    source = ASTSource(getattr(kernels, name), types, sizes)
    code: str = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return code


def test_jitter_rounds_after_every_operation() -> None:
    """As tensor expressions do: no fused multiply-add, no approximate quotient."""
    types = {"x_": "*fp32", "mean_": "*fp32", "factor_": "*fp32", "order_": "*i64", "y_": "*fp32"}
    code = compiled(
        "jitter", {**types, "HW": "i32"}, {"TURN": 1, "BLOCK": 1024}, enable_fp_fusion=False
    )
    assert "mul.rn.f32" in code and "div.rn.f32" in code
    assert not any(word in code for word in ("fma.", "div.full", "rcp.approx"))


@pytest.mark.parametrize("side", [17, 32, 64])
def test_augmix_waits_where_it_reads_other_pixels(side: int) -> None:
    types = dict.fromkeys(
        ("x_", "length_", "operation_", "weight_", "share_", "work_", "y_"), "*fp32"
    )
    block = triton.next_power_of_2(side * side)
    code = compiled(
        "augmix",
        {**types, "N": "i32", "severity": "fp32"},
        {"CHAINS": 3, "DEPTH": 3, "H": side, "W": side, "BLOCK": block},
        num_warps=min(max(block // 128, 4), 16),
    )
    accesses = re.findall(r"bar\.sync|ld\.global|st\.global", code)
    parts = [name for name, _ in itertools.groupby(accesses)]
    first = parts.index("st.global")  # what the images are then; reductions have other barriers
    assert parts[first - 1 : first + 3] == ["bar.sync", "st.global", "bar.sync", "ld.global"]
    assert parts.count("st.global") == 2  # the other one is the result
    assert "atom.global" not in code and "red.global" not in code  # sums would change their order
