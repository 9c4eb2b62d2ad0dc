"""What the compiler makes of the kernels of the first convolution. Needs Triton, but no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled with TRITON_INTERPRET=1", allow_module_level=True)

from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from protofed.engines.lanes import stem, stem_kernels  # noqa: E402

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16 = ("w_", "y_", "dy_")
GRADIENT = {"num_warps": stem.WARPS, "num_stages": 1}


def compiled(kernel: str, image: str, inputs: int, outputs: int, options: dict[str, int]) -> Any:
    """For a Hopper GPU, with images in channels last."""
    function = getattr(stem_kernels, kernel)
    sizes = {
        "CI": inputs, "CO": outputs, "H": 32, "W": 32, "LAST": True, "COLUMNS": min(outputs, 64),
        "DEPTH": triton.next_power_of_2(9 * inputs), "ROWS": stem.ROWS, "PIXELS": stem.PIXELS,
        "DTYPE": tl.bfloat16, "sc": 1,
    }  # fmt: skip
    sizes = {name: size for name, size in sizes.items() if name in function.arg_names}
    kinds = {"x_": f"*{image}", **dict.fromkeys(BF16, "*bf16"), **dict.fromkeys(sizes, "constexpr")}
    signature = {
        name: kinds.get(name, "*fp32" if name.endswith("_") else "i32")
        for name in function.arg_names
    }
    aligned = [i for i, (_, kind) in enumerate(signature.items()) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(function, signature, sizes, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def registers(code: Any, folder: Path) -> tuple[int, int]:
    """Of a thread, and the bytes of memory it needs since they do not suffice."""
    (folder / "code.cubin").write_bytes(code["cubin"])
    command = [str(TOOL), "-res-usage", str(folder / "code.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.skipif(not TOOL.exists(), reason="Triton's package has no cuobjdump")
@pytest.mark.parametrize("image", ["fp32", "bf16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 64), (1, 16), (4, 64), (3, 32)])
def test_registers_suffice(image: str, inputs: int, outputs: int, tmp_path: Path) -> None:
    for kernel, options in {
        "convolve": {"num_warps": 4},
        "weight_gradient": GRADIENT,
    }.items():
        used, spilled = registers(compiled(kernel, image, inputs, outputs, options), tmp_path)
        assert spilled == 0 and used <= 168, kernel


def test_maps_are_read_and_written_16_bytes_at_a_time() -> None:
    forward = compiled("convolve", "fp32", 3, 64, {"num_warps": 4})["ptx"]
    assert "wgmma.mma_async" in forward
    stores = re.findall(r"st\.global\.(\S+)", forward)
    assert len([s for s in stores if s == "v4.b32"]) == 8 and len(stores) == 10  # two are of sums
    backward = compiled("weight_gradient", "fp32", 3, 64, GRADIENT)["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", backward)) >= 4


@pytest.mark.parametrize("image", ["fp32", "bf16"])
@pytest.mark.parametrize("inputs", [1, 3, 4])
def test_tensor_cores_are_waited_for(image: str, inputs: int) -> None:
    """Before their input is overwritten: ``mma`` does it by itself, ``wgmma`` must be told to."""
    code = compiled("weight_gradient", image, inputs, 64, GRADIENT)["ptx"]
    pending = re.findall(r"wgmma.wait_group.sync.aligned (\d+)", code)
    assert set(pending) == {"0"} if "wgmma.mma_async" in code else "mma.sync" in code
