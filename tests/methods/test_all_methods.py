"""What holds for every method of the package: two rounds, four clients, a tiny CNN in bfloat16."""

import inspect
import json
import math
import sys

import pytest
import torch
from tests.some_methods import made

from protofed import analysis, tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Observer
from protofed.method import Entry
from protofed.methods import (
    FPL,
    I2PFL,
    METHODS,
    FedAdam,
    FedAvgGA,
    FedDyn,
    FedGH,
    FedMD,
    FedProc,
    FedProto,
    FedSeProto,
    FedTGP,
    Scaffold,
    create,
)
from protofed.models import entries
from protofed.runs.run import run
from protofed.testing import run_checks
from protofed.testing.checks import SHORT, tiny_task

CLIENTS = 4
# clients of "right" take 3 steps per epoch and those of "left" 2: their BatchNorm counters differ
SMALL = {**SHORT, "samples": {"left": 12, "right": 20}, "precision": "bf16"}


class Recorder(Observer):
    """Keeps what was sent in every round, and the federation."""

    def __init__(self):
        self.sent = []

    def start(self, federation, records):
        self.federation = federation
        train = federation.engine.train

        def recording(sites, received, mine, round):
            replies = {}
            self.sent.append((tree.copy(received), replies))
            for name, reply in train(sites, received, mine, round):
                replies[name] = reply
                yield name, reply

        federation.engine.train = recording


@pytest.fixture(scope="module", params=list(METHODS))
def finished(request, tmp_path_factory):
    """A method, its finished run with a folder, and what was sent in it."""
    method, recorder = made(request.param), Recorder()
    out = tmp_path_factory.mktemp(request.param) / "run"
    result = run(tiny_task(spare=12), method, out=out, observers=[recorder], **SMALL)
    return method, result, recorder


def size(content):
    """Bytes of a message, counted entry by entry."""
    return sum(t.detach().numpy().nbytes for slot in content.values() for t in slot.values())


def slots_of(content):
    """The names of the slots that hold something."""
    return {slot for slot, found in content.items() if found}


def states(recorder):
    """The final state of the server and of the clients."""
    federation = recorder.federation
    return federation.server.state, list(federation.store.accept().values())


# ---- a run against what its method declares ------------------------------------------------------


def test_everything_is_finite(finished):
    _, result, recorder = finished
    assert len(result.rounds) == 2
    for record in result.rounds:
        assert all(math.isfinite(v) for v in record["loss"].values())
        assert all(0 <= a <= 100 for a in record["accuracy"].values())
    server, clients = states(recorder)
    for content in (server, *clients):
        assert all(t.isfinite().all() for slot in content.values() for t in slot.values())


def test_slots_are_as_declared(finished):
    method, _, recorder = finished
    declared = method.slots
    server, clients = states(recorder)
    for round, (received, replies) in enumerate(recorder.sent):
        if round or not method.public_images:  # a consensus on public images takes a round
            assert slots_of(received) - {"model"} == set(declared.down)
        for reply in replies.values():
            assert slots_of(reply.message) - {"model"} == set(declared.up)
            assert slots_of(reply.mine) - {"model"} == set(declared.client)
    assert slots_of(server) - {"model"} == {*declared.down, *declared.server}
    for state in clients:
        assert slots_of(state) - {"model"} == set(declared.client)
    assert all(declared.down.values()) and all(declared.up.values()), "they say what they hold"


def test_entries_of_the_model_travel_as_declared(finished):
    method, _, recorder = finished
    network = recorder.federation.make_network()
    ways = {n: method.shared(Entry(n, kind)) for n, kind in entries(network).items()}
    up, down, private = (
        {n for n, way in ways.items() if way in which}
        for which in (("both",), ("both", "down"), ("no",))
    )
    assert bool(up | down) == bool(method.slots.model)
    server, clients = states(recorder)
    assert set(server.get("model", {})) == down
    assert len(clients) == (CLIENTS if private or method.slots.client else 0)
    for state in clients:
        assert set(state.get("model", {})) == private
    for received, replies in recorder.sent:
        assert set(received.get("model", {})) == down
        for reply in replies.values():
            assert set(reply.message.get("model", {})) == up
    shapes = {n: t.shape for n, t in network.state_dict().items()}
    assert all(t.shape == shapes[n] for n, t in server.get("model", {}).items())


def test_tables_have_a_row_per_class(finished):
    _, _, recorder = finished
    sizes = recorder.federation.sizes
    for received, replies in recorder.sent:
        for content in (received, *(r.message for r in replies.values())):
            for found in content.values():
                if "mean" not in found:
                    continue
                mean, mask = found["mean"], found["mask" if "mask" in found else "count"]
                assert (mean.shape[0], mean.shape[-1]) == (sizes.classes, sizes.features)
                assert mask.shape == mean.shape[:-1]


def test_recorded_bytes_are_the_sum_of_what_was_sent(finished):
    _, result, recorder = finished
    lines = (result.folder / "rounds.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == len(recorder.sent) == 2
    for text, (received, replies) in zip(lines, recorder.sent, strict=True):
        record = json.loads(text)
        assert record["clients"] == len(replies) == CLIENTS
        assert record["bytes_down"] == CLIENTS * size(received)
        assert record["bytes_up"] == sum(size(r.message) for r in replies.values())


def test_nothing_is_sent_or_kept_in_bfloat16(finished):
    """The network computes in it; prototypes and weights are float32 all the same."""
    _, result, recorder = finished
    for received, replies in recorder.sent:
        for content in (received, *(t for r in replies.values() for t in (r.message, r.mine))):
            for slot, found in content.items():
                for entry, value in found.items():
                    wide = value.dtype in (torch.float32, torch.float64)
                    assert wide or not value.is_floating_point(), (slot, entry)
    for round in analysis.prototype_rounds(result):
        assert analysis.prototypes(result, round).sent


def test_batchnorm_counters_are_never_averaged(finished):
    method, result, recorder = finished
    counters = [n for n, t in result.model.items() if not t.is_floating_point()]
    kinds = entries(recorder.federation.make_network())
    sent = [n for n, kind in kinds.items() if method.shared(Entry(n, kind)) == "both"]
    assert len(counters) == sum(n.endswith("num_batches_tracked") for n in sent)
    received = [received for received, _ in recorder.sent]
    after = [received[1].get("model", {}), result.model]
    for (_, replies), model in zip(recorder.sent, after, strict=True):
        for n in counters:
            values = [int(r.message["model"][n]) for r in replies.values()]
            assert min(values) < max(values)  # a mean would show
            assert model[n].dtype == torch.int64
            assert int(model[n]) == max(values)


# ---- the checks, on variants (tests/test_testing.py has every method as it stands) ---------------


# all that a variant can change for itself; its runs are resumed as those of the method are
QUICK = ("gradients", "weights 0 = FedAvg", "missing class", "serialization", "capture-safety")


@pytest.mark.parametrize("only", [QUICK, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "variant",
    [
        FedDyn(variant="reference"),
        FedAdam(variant="yogi"),
        Scaffold(rho=0.9),
        FedProc(warmup=True, proto_pass="post"),
        FedAvgGA(metric="loss", holdout=0.3),
        FPL(cpcl_prototypes="global", upcr_prototypes="global", upcr_reduction="sum"),
        FPL(cpcl=0, upcr=0),
        I2PFL(mixup="input", inter="cluster", detach=False, ema="as_text", gamma_max=True),
        I2PFL(lambda_inter=0),
        FedProto(share="prototypes"),
        FedGH(proto_pass="last_epoch", header_epochs=1),
        FedMD(public="left", digest_epochs=2, digest_batch=5),
        FedSeProto(kl="moments", decoder_step=10.0),
        FedSeProto(share="prototypes", proto_pass="last_epoch"),
        FedTGP(share="model", server_epochs=2),
        create("fpl", {"reading": "printed"}),
        # summed over d, these weights are a hundred times too large for the tiny task
        create("i2pfl", {"reading": "printed", "lambda_intra": 0.01}),
        create("fedseproto", {"reading": "printed", "lam": 0.01}),
    ],
    ids=lambda m: m.name,
)
def test_variants_pass_the_checks(variant, only):
    assert [r.line() for r in run_checks(variant, only=only) if r.failed] == []


# ---- words and numbers of the papers -------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_a_methods_file_names_its_paper_and_its_deviations(name):
    cls = METHODS[name]
    text = inspect.getdoc(sys.modules[cls.__module__])
    author = cls.paper.replace(" et al.", "").split(",")[0]
    venue, year = cls.paper.split(", ")[-1].rsplit(" ", 1)
    for word in (author, venue, year):
        assert word in text, word
    assert "Deviations" in text or "Where the paper" in text or venue == "this package"
    assert '"' in text  # the paper's title


LAST_EPOCH, POST = {"proto_pass": "last_epoch"}, {"proto_pass": "post"}
PAPER_DEFAULTS = {
    "ccst": {
        "encoder": "",
        "decoder": "",
        "styles": "overall",
        "single": 16,
        "variants": 3,
        "enlarge": 2,
    },
    "fedavg": {},
    "fedprox": {"mu": 1e-4},
    "protostyle": {
        "p": 1.0,
        "lambda_view": 1.0,
        "lambda_intra": 10.0,
        "alpha": 0.4,
        "balanced": True,
        "stages": "auto",
    },
    "moon": {"mu": 5.0, "tau": 0.5},
    "feddyn": {"alpha": 0.01, "clip": 10.0, "variant": "correct"},
    "fedopt": {"eta_g": 0.25, "beta": 0.9},
    "fedavgm": {"beta": 0.9},
    "fedadam": {"eta_g": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "variant": "adam"},
    "fednova": {"rho": 0.9},
    "scaffold": {"eta_g": 1.0, "rho": 0.0},
    "fedbn": {},
    "fedproc": {"tau": 1.0, "warmup": False, **LAST_EPOCH},
    "fedproto": {"weight": 1.0, **LAST_EPOCH, "share": "auto"},
    "fpl": {
        "tau": 0.02,
        "cpcl": 1.0,
        "upcr": 1.0,
        "cpcl_prototypes": "cluster",
        "upcr_prototypes": "unbiased",
        "finch_level": "last",
        "upcr_reduction": "mean",
        **LAST_EPOCH,
    },
    "fedplvm": {"alpha": 0.25, "tau": 0.07, "lam": 1.0},
    "fedrdn": {"draw": "image"},
    "stablefdg": {"p": 0.5, "stage": "stage1", "highlighter": True},
    "i2pfl": {
        "tau": 0.07,
        "alpha": 0.4,
        "lambda_intra": 10.0,
        "lambda_inter": 1.0,
        "beta": 0.99,
        "ema": "as_written",
        "inter": "reweight",
        "mixup": "feature",
        "gamma_max": False,
        "apa_reduction": "mean",
        "detach": True,
        **LAST_EPOCH,
    },
    "fedmlp": {"lambda1": 1.0, "lambda2": 1.0, "tau": 0.5, **LAST_EPOCH},
    "fedsr": {"c1": 0.01, "c2": 0.001, "z_samples": 20},
    "fedavg_ga": {"s0": 0.2, "metric": "accuracy", "holdout": 0.1},
    "fedga": {"mu": 1e-4, "s0": 0.2, "metric": "accuracy", "holdout": 0.1},
    "copa": {},
    "mixstyle": {"p": 0.5, "alpha": 0.1, "stages": "auto"},
    "dsu": {"p": 0.5, "stages": "auto"},
    "fedfa": {"p": 0.5, "server_var": "per_channel", "stages": "auto"},
    "fedseproto": {
        "alpha": 1.0,
        "beta": 1.0,
        "lam": 1.0,
        "decoder_step": 1.0,
        "first_phase": 0.2,
        "kd_sign": "corrected",
        "kl": "unit",
        "proto_reduction": "mean",
        **POST,
        "share": "auto",
    },
    "local": {},
    "fedmd": {
        "public": "unused",
        "images": 2000,
        "warm_up": 1,
        "digest_epochs": 1,
        "digest_batch": 256,
        "digest_lr": 0.001,
    },
    "fedgh": {"eta": 0.01, "header_epochs": 10, "header_batch": 10, **POST},
    "fedccrl": {
        "ratio": 0.1,
        "alpha": 0.1,
        "severity": 3.0,
        "chains": 3,
        "depth": 3,
        "tau": 0.1,
        "lambda1": 0.1,
        "lambda2": 0.1,
    },
    "feddap": {"lambda1": 10.0, "lambda2": 1.0, "tau": 0.02, "fusion": 0.001, **LAST_EPOCH},
    "fedtgp": {
        "lam": 10.0,
        "margin": 100.0,
        "eta": 0.01,
        "server_epochs": 100,
        "server_batch": 10,
        **POST,
        "share": "prototypes",
    },
}
PER_TASK = {
    ("i2pfl", "office_caltech"): {"tau": 0.02},
    ("i2pfl", "pacs"): {"tau": 0.04, "alpha": 0.2, "lambda_intra": 2.0},
}
PRINTED = {
    "fpl": {"finch_level": "first", "upcr_reduction": "sum", **POST},
    "i2pfl": {"apa_reduction": "class_means", "detach": False, **POST},
    "fedseproto": {"kd_sign": "printed", "proto_reduction": "sum"},
}


@pytest.mark.parametrize("task", ["", "digits", "office_caltech", "pacs", "vlcs", "glyphs"])
@pytest.mark.parametrize("name", list(METHODS))
def test_defaults_are_the_papers(name, task):
    expected = {**PAPER_DEFAULTS[name], **PER_TASK.get((name, task), {})}
    assert METHODS[name].defaults(task) == expected
    assert create(name, task=task).options() == expected
    if name in PRINTED:
        assert create(name, {"reading": "published"}, task).options() == expected
        printed = create(name, {"reading": "printed"}, task)
        assert printed.options() == {**expected, **PRINTED[name]}
    else:
        with pytest.raises(ProtofedError, match="hyper-parameter"):
            create(name, {"reading": "printed"}, task)


def test_what_is_typed_wins_over_the_tasks_default():
    method = create("i2pfl", {"tau": 0.5}, "pacs")
    assert (method.tau, method.alpha, method.lambda_intra) == (0.5, 0.2, 2.0)


def test_a_config_takes_the_defaults_of_its_task():
    assert make_config("glyphs", "i2pfl").method == I2PFL()
    assert make_config("glyphs", "i2pfl", {"tau": 0.5}).method == I2PFL(tau=0.5)
