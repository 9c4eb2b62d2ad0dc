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

from protofed.engines.lanes import convolution  # noqa: E402
from protofed.engines.lanes import convolution_kernels as kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SIDE = 16
CASES = [(64, 4096), (128, 4096), (128, 256)]  # channels and pixels that have tiles of their own
KERNELS = ["convolve", "input_gradient", "strided_input_gradient", "weight_gradient"]
# an instruction of the tensor cores: what is added to, then the two operands
PRODUCT = re.compile(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\{[^}]*\}|%\w+),\s*(%\w+),")


def arguments(
    kernel: str, width: int, pixels: int
) -> tuple[dict[str, Any], dict[str, Any], convolution.Tile]:
    """A kernel's inputs (boxes of descriptors, types of others), its sizes, and its tile."""
    weight = kernel == "weight_gradient"
    tile = (
        convolution._weight_tile(width, width)
        if weight
        else convolution._tile(width, width, pixels)
    )
    images, rows = convolution._box(tile.depth if weight else tile.rows, SIDE, SIDE)
    sizes: dict[str, Any] = {"CI": width, "CO": width, "NB": images, "BH": rows}
    if not weight:
        sizes |= {"COLUMNS": tile.columns, "DEPTH": tile.depth}
    box = [images, rows, SIDE, tile.depth]
    strided = [images, rows, 1, SIDE]
    matrix, part = [tile.rows, tile.columns], [tile.depth, tile.columns]
    inputs: dict[str, Any]
    if kernel == "convolve":
        inputs = {"x_d": [*strided, tile.depth], "w_d": [tile.columns, tile.depth], "y_d": matrix}
        inputs |= {"part_": "*fp32", "R": "i32"}
        sizes |= {"STRIDE": 2, "TAPS": 9, "HO": SIDE, "WO": SIDE}
    elif kernel == "input_gradient":
        inputs = {"g_d": box, "w_d": part, "dx_d": matrix, "add_d": matrix}
        inputs |= {"y_d": matrix, "x_d": matrix}
        inputs |= dict.fromkeys(["mean_", "scale_", "part_"], "*fp32")
        sizes |= {"H": SIDE, "W": SIDE, "ADD": True, "NORM": True}
    elif kernel == "strided_input_gradient":
        inputs = {"g_d": box, "w_d": part, "g1_d": box, "w1_d": part}
        inputs |= {"dx_d": [*strided, tile.columns]}
        sizes |= {"HO": SIDE, "WO": SIDE}
    else:
        inputs = {"x_d": [*strided, tile.rows], "g_d": part, "dw_": "*fp32", "N": "i32"}
        sizes |= {"STRIDE": 1, "TAPS": 9, "HO": SIDE, "WO": SIDE}
        sizes |= {"IN": tile.rows, "OUT": tile.columns, "PARTS": 7}
    return inputs, sizes, tile


@pytest.mark.parametrize(("width", "pixels"), CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tensor_cores_read_both_operands_from_shared_memory(
    kernel: str, width: int, pixels: int
) -> None:
    """Descriptors of it, that is, as which an operand is a number and not a set of registers.

    Into registers, Triton 3.6 loads the next box while tensor cores still read the last: a race.
    """
    inputs, sizes, tile = arguments(kernel, width, pixels)
    signature = {
        name: f"tensordesc<bf16{kind}>" if isinstance(kind, list) else kind
        for name, kind in inputs.items()
    }
    source = ASTSource(
        getattr(kernels, kernel), {**signature, **dict.fromkeys(sizes, "constexpr")}, sizes
    )
    code = triton.compile(source, target=HOPPER, options=tile.launch).asm
    assert "cp.async.bulk.tensor" in code["ptx"]
    products = PRODUCT.findall(code["ptx"])
    assert products and len(products) == code["ptx"].count("wgmma.mma_async")
    assert not any("{" in first for first, _ in products)
    # A product is under way while the next boxes are waited for; all are done before the end.
    pending = set(re.findall(r"wgmma.wait_group.sync.aligned (\d+)", code["ptx"]))
    assert pending == {"0", "1"}
