"""The estimate of a run's memory: of what it is made, and when a run is refused for it."""

import re
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from protofed import run
from protofed.config import execute_models, make_config
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.federation import memory
from protofed.federation.facts import discover
from protofed.federation.memory import Memory, estimate, free_memory
from protofed.federation.simulation import Federation
from protofed.studies.execution import Job, default_jobs
from protofed.testing.checks import SHORT, tiny_task

GB = 10**9
FREE = Memory(GB, 0, 0, 0, 8 * GB, gpu=False)


def large_task(side=224, images=2000):
    """A task of that size which takes no memory: all pixels are one."""

    def domain():
        x = torch.zeros(1, dtype=torch.uint8).expand(images, 3, side, side)
        return Images(x, torch.zeros(images, dtype=torch.int64))

    domains = {name: Domain(domain(), domain()) for name in ("a", "b")}
    each = dict.fromkeys(domains, 1.0)
    return Task("large", tuple("01234"), domains, Augment(), dict.fromkeys(domains, 2), each)


def of(task, **settings):
    config = make_config(task, **{"device": "cpu", "engine": "loop", **settings})
    return estimate(discover(config, task).applied(config), task)


def test_it_grows_with_what_takes_memory():
    task = large_task()
    base = {"model": "resnet18", "batch": 16, "samples": 500}
    one = of(task, **base)
    assert of(task, **base, width=128).weights > 3.5 * one.weights
    at_once = one.activations - memory.MOST_KEPT
    for factor, changed in (2, {"width": 128}), (2, {"precision": "fp64"}), (8, {"batch": 128}):
        more = of(task, **{**base, **changed}).activations - memory.MOST_KEPT
        assert more == pytest.approx(factor * at_once, rel=0.01)
    assert of(task, **{**base, "samples": 1000}).images > one.images
    assert of(task, **base, participation=0.25).images < one.images
    two = of(task, **base, engine="workers", workers=2)
    assert two.activations == 2 * one.activations and two.weights > one.weights
    single = of(task, **base, engine="workers", workers=1)
    assert single.images < one.images, "one client's images at a time, not those of all four"
    four = of(task, **base, engine="workers", workers=4)
    assert four.weights - two.weights > 2 * 7 * 44e6, "a network and six copies in each process"
    assert of(large_task(64), **base).activations - memory.MOST_KEPT < at_once / 3
    assert of(task, **base, method="scaffold").weights > one.weights, "clients keep a state"
    assert of(task, **base, optimizer="adam").weights > one.weights, "two averages, not one"
    assert one.loaded == 4 * 2000 * 3 * 224**2 < one.images


def test_the_activations_of_a_network():
    """A tensor of each layer that has a gradient, counted here at the real size."""
    task, batch = tiny_task(), 4
    config = make_config(task, **{**SHORT, "model": "resnet10", "width": 8, "batch": batch})
    found = discover(config, task).applied(config)
    state, each = memory._measure(found, task, "resnet10")
    network = memory.build("resnet10", len(task.classes), task.image_size, 8, None)
    assert state == sum(t.numel() for t in network.state_dict().values())
    largest = 8 * task.image_size**2
    assert max(each) == largest
    # stem and first block: a convolution's result and a ReLU's, three times
    assert each.count(largest) == 6


@pytest.mark.parametrize("model", ["resnet18_imagenet", "net.py:conv"])
def test_the_activations_of_large_images(model, tmp_path, monkeypatch):
    """What the backward pass of a real step keeps, but for a few percent."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def conv(size):\n"
        "    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)\n"
        "    return nn.Sequential(*layers, nn.Flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    execute_models({"model": model})
    task = large_task(side=128, images=20)
    config = make_config(task, model=model)
    _, each = memory._measure(discover(config, task).applied(config), task, model)
    network = memory.build(model, 5, 128)
    weights = {t.data_ptr() for t in network.state_dict().values()}
    saved = {}

    def keep(tensor):
        saved[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.zeros(2, 3, 128, 128))
    sizes = [t.numel() // 2 for t in saved.values() if t.data_ptr() not in weights]
    assert sum(each) == pytest.approx(sum(sizes), rel=0.05)
    assert max(each) == max(sizes)


def test_lanes_have_a_whole_epoch_of_images_at_once():
    task = large_task()
    config = make_config(task, model="resnet18_imagenet", samples=500, max_memory_gb=1)
    found = discover(replace(config, device="cpu"), task).applied(config)
    on_cpu, on_gpu = (estimate(replace(found, device=d, engine="loop"), task).images
                      for d in ("cpu", "cuda"))  # fmt: skip
    assert on_gpu - on_cpu == 500 * 3 * 224**2 * 5


def test_a_process_on_a_cpu_keeps_what_it_frees():
    """Small runs took up to three times their estimate without it."""
    task = tiny_task()
    config = make_config(task, **{**SHORT, "engine": "workers", "workers": 2})
    found = discover(config, task).applied(config)
    _, each = memory._measure(found, task, config.model)
    train, test = 4 * 8 * sum(each), 4 * 22 * 4 * max(each)  # batches of 8, 22 images at most
    each_process = max(train, test) + train + test
    assert estimate(found, task).activations == 2 * each_process


def test_a_frozen_backbone_keeps_no_activations():
    task = large_task()
    base = {"model": "resnet18_imagenet", "batch": 64, "samples": 500}
    assert of(task, **base, train="head").activations < of(task, **base).activations / 1.5


def test_a_run_that_killed_the_process_is_refused(monkeypatch):
    """224 pixels and ResNet-18 on two cores."""
    monkeypatch.setattr(memory, "free_memory", lambda: 21 * GB)
    task = large_task()
    base = {"model": "resnet18", "batch": 64, "samples": 0.2}
    needs = of(task, **base, engine="workers", workers=2)
    assert 30 * GB < needs.total < 40 * GB
    with pytest.raises(ProtofedError) as error:
        needs.require()
    for part in ("activations", "22.2 GB", "--batch", "--workers", "--max-memory-gb"):
        assert part in str(error.value)
    lifted = re.search(r"--max-memory-gb (\S+)", error.value.hint)
    of(task, **base, engine="workers", workers=2, max_memory_gb=float(lifted[1]) + 0.1).require()
    with pytest.raises(ProtofedError, match=r"only 1\.7 GB is available"):  # 1.2 GB are loaded
        of(task, **base, max_memory_gb=0.5).require()


def test_nothing_is_made_for_a_run_that_does_not_fit(tmp_path):
    task = tiny_task()
    with pytest.raises(ProtofedError, match=r"needs about .*weights .*--width"):
        run(task, out=tmp_path / "run", **{**SHORT, "model": "resnet18", "width": 100_000})
    assert not (tmp_path / "run").exists()


def test_out_of_memory_in_words(monkeypatch):
    of_torch = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    for error in (MemoryError(), RuntimeError(of_torch)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(Federation, "run_round", fail)
        with pytest.raises(ProtofedError, match="out of memory"):
            run(tiny_task(), **SHORT)
    monkeypatch.setattr(Federation, "run_round", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny_task(), **SHORT)


def test_a_network_of_ones_own_that_needs_numbers(monkeypatch):
    task = tiny_task()
    config = make_config(task, **SHORT)
    found = discover(config, task).applied(config)
    plain = estimate(found, task)

    def network(self, backbone, sizes):
        next(backbone.parameters()).sum().item()  # cannot be had of a shape
        return backbone

    monkeypatch.setattr(type(config.method), "network", network)
    assert estimate(found, task).weights == plain.weights


# ---- what there is ------------------------------------------------------------------------------


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def system(root, cgroup, meminfo="MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"):
    write(root, proc__meminfo=meminfo, proc__self__cgroup=cgroup)


def limits(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"inactive_file {cache}\ntotal_inactive_file {cache}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_what_the_machine_has(tmp_path):
    assert free_memory(tmp_path) is None, "not Linux"
    system(tmp_path, "0::/\n")
    assert free_memory(tmp_path) == 8000 * 1024
    write(tmp_path, proc__meminfo="nothing of the sort\n")
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [("0::/a/job\n", "", V2), ("3:cpu:/x\n4:memory,hugetlb:/a/job\n0::/\n", "memory", V1)],
)
def test_what_a_container_or_a_batch_job_may_take(tmp_path, line, base, names):
    system(tmp_path, line)
    groups = tmp_path / "sys/fs/cgroup" / base
    limits(groups / "a/job", names, 1_000_000, 400_000, 100_000)
    assert free_memory(tmp_path) == 700_000
    limits(groups / "a", names, 600_000, 400_000, 100_000)  # the group that it is in has less
    assert free_memory(tmp_path) == 300_000
    limits(groups / "a", names, "max", 400_000, 100_000)
    assert free_memory(tmp_path) == 700_000


def test_runs_at_a_time_fit_into_memory(monkeypatch):
    monkeypatch.setattr("protofed.studies.execution.core_count", lambda: 16)
    job = Job("x", None, None, "")
    assert default_jobs([job]) == 16, "nothing is to be done"
    assert default_jobs([replace(job, memory=FREE)]) == 8
    assert default_jobs([replace(job, memory=replace(FREE, weights=20 * GB))]) == 1
    assert default_jobs([replace(job, memory=replace(FREE, free=None))]) == 16
