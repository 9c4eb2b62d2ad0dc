"""Convolutions of a ResNet for small images: this package's kernels against cuDNN's, on a GPU.

    python benchmarks/convolutions.py [--batches 64,32]

Each layer of a ResNet-10 (64 to 512 channels, maps of 32 to 4 pixels) in bfloat16 and channels
last, forward, for the gradient of its input and of its weight. As in training, eight streams do
the same at once, from a recorded graph, each with tensors of its own; times are microseconds of
the whole GPU for one convolution. The kernels' forward pass also computes the sums that BatchNorm
needs, which cuDNN's does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from protofed.engines.lanes import convolution

LAYERS = {  # input and output channels, side of the input, stride, how many a ResNet-10 has
    "stage 1": (64, 64, 32, 1, 2),
    "stage 2, first": (64, 128, 32, 2, 1),
    "stage 2": (128, 128, 16, 1, 1),
    "stage 3, first": (128, 256, 16, 2, 1),
    "stage 3": (256, 256, 8, 1, 1),
    "stage 4, first": (256, 512, 8, 2, 1),
    "stage 4": (512, 512, 4, 1, 1),
}
STREAMS, CALLS, REPLAYS = 8, 4, 20


class Layer:
    """A convolution with its tensors, computed in both ways."""

    def __init__(self, batch: int, inputs: int, outputs: int, side: int, stride: int) -> None:
        self.stride = stride
        self.x = drawn(batch, inputs, side, side)
        self.weight = drawn(outputs, inputs, 3, 3) / (9 * inputs) ** 0.5
        self.g = drawn(batch, outputs, side // stride, side // stride)
        # a strided block has a 1×1 convolution of the same input, whose gradient is added
        self.weight1 = drawn(outputs, inputs, 1, 1)

    def ours(self, what: str) -> Tensor:
        if what == "forward":
            return convolution.convolve(self.x, self.weight, self.stride)[0]
        if what == "weight":
            return convolution.weight_gradient(self.x, self.g, self.weight, self.stride)
        if self.stride == 1:
            return convolution.input_gradient(self.g, self.weight)
        return convolution.strided_input_gradient(self.g, self.weight, self.g, self.weight1)

    def cudnn(self, what: str) -> Tensor:
        sizes = ([self.stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
        if what == "forward":
            return torch.ops.aten.convolution(self.x, self.weight, None, *sizes)
        mask = [what == "input", what == "weight", False]
        grads = torch.ops.aten.convolution_backward(self.g, self.x, self.weight, None, *sizes, mask)
        return grads[0] if what == "input" else grads[1]


def drawn(*shape: int) -> Tensor:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of the GPU for one call, where a stream for each of them repeats it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    streams, graph = [torch.cuda.Stream() for _ in calls], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    call()
        for stream in streams:  # not before all are under way
            main.wait_stream(stream)
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / (REPLAYS * CALLS * len(calls)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="64,32")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {STREAMS} streams at once")
    for batch in map(int, given.batches.split(",")):
        totals = [0.0, 0.0]
        for name, (inputs, outputs, side, stride, count) in LAYERS.items():
            layers = [Layer(batch, inputs, outputs, side, stride) for _ in range(STREAMS)]
            gflop = 2e-9 * batch * (side // stride) ** 2 * outputs * inputs * 9
            for what in ("forward", "input", "weight"):
                cudnn = microseconds([lambda at=at, what=what: at.cudnn(what) for at in layers])
                ours = microseconds([lambda at=at, what=what: at.ours(what) for at in layers])
                totals = [totals[0] + count * cudnn, totals[1] + count * ours]
                print(
                    f"batch {batch}  {name:15} {what:8} cuDNN {cudnn:5.1f} us "
                    f"({1e3 * gflop / cudnn:4.0f} TFLOP/s)  ours {ours:5.1f} us "
                    f"({1e3 * gflop / ours:4.0f} TFLOP/s)  {cudnn / ours:.2f} times",
                    flush=True,
                )
        print(
            f"batch {batch}  all 3×3 convolutions of a step: cuDNN {totals[0]:.0f} us, ours "
            f"{totals[1]:.0f} us, {totals[0] / totals[1]:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
