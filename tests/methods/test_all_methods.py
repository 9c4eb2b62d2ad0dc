"""What holds for every method of the package, on glyphs: two rounds, four clients, a tiny CNN."""

import inspect
import json
import math
import sys

import pytest
import torch

from protofed import analysis, tree
from protofed.config import make_config
from protofed.federation.simulation import Observer
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
    Scaffold,
    create,
)
from protofed.runs.records import read_records, without_times
from protofed.runs.run import run
from protofed.testing.checks import check

CLIENTS = 4
SMALL = {
    "clients": 1,
    # one client takes 3 steps an epoch and the others 2: their BatchNorm counters differ
    "samples": {"scan": 12, "print": 20, "photo": 12, "inverse": 12},
    "rounds": 2,
    "epochs": 1,
    "batch": 8,
    "lr": 0.05,
    "model": "cnn2",
    "width": 4,
    "norm": "batch",
    "device": "cpu",
    "engine": "loop",
}

# The sizes of that CNN, in numbers: 32×32 images, 10 classes, 512 features, float32.
K, D = 10, 512
PARAMETERS = 3 * 4 * 9 + 2 * 4 + 4 * 8 * 9 + 2 * 8 + (8 * 8 * 8 * D + D) + (D * K + K)
MODEL = 4 * (PARAMETERS + 2 * 4 + 2 * 8) + 2 * 8  # + running statistics, two int64 counters
SEMANTIC = 4 * (D * D + D)
DECODER = 4 * (
    (2 * D * 2048 + 2048) + (128 * 64 * 16 + 64) + (64 * 32 * 16 + 32) + (32 * 3 * 16 + 3)
)
TABLE = 4 * (K * D + K)  # one prototype a class, and its counts or mask
HEAD = 4 * (D * K + K)
GAUSSIAN = 4 * (D * 2 * D + 2 * D)
REFERENCE = 4 * (2 * K * D + 1)  # FedSR's r, ρ and C
SCORES = 2 * 8  # GA's two numbers
BATCHNORM = 4 * 4 * (4 + 8) + 2 * 8  # scale, shift, running mean and variance; the counters

MODULES = {"fedseproto": 2 * SEMANTIC + DECODER, "fedsr": GAUSSIAN + REFERENCE}  # extra ones
KEPT = {  # bytes at each client between rounds; methods not named keep nothing
    "moon": MODEL + 4,
    "feddyn": 4 * PARAMETERS,
    "scaffold": 4 * PARAMETERS,
    "fedbn": BATCHNORM,
    "fedseproto": SEMANTIC + DECODER,  # the domain encoder is as large as the semantic one
    "fedsr": REFERENCE,
    "copa": HEAD,
    "local": MODEL,
    "fedmd": MODEL,
    "fedgh": MODEL - HEAD,
}
SLOTS_KEPT = {
    "moon": {"previous", "history"},
    "feddyn": {"g"},
    "scaffold": {"c_m"},
    "fedbn": {"model"},
    "fedseproto": {"model"},
    "fedsr": {"model"},
    "copa": {"model"},
    "local": {"model"},
    "fedmd": {"model"},
    "fedgh": {"model"},
}
TRAVELS = {  # bytes of slot "model" going up, where a client keeps a part of the network
    "fedseproto": MODEL + SEMANTIC,
    "fedbn": MODEL - BATCHNORM,
    "fedsr": MODEL + GAUSSIAN,
    "copa": MODEL - HEAD,
    "local": 0,
    "fedmd": 0,
    "fedgh": 0,
}
DOWN = {**TRAVELS, "fedgh": HEAD}  # the same, coming down
PUBLIC = (500 - 12) + (500 - 20) + (350 - 12) + (250 - 12)  # FedMD's N: what no client holds
LOGITS = 4 * PUBLIC * K
SLOTS_UP = {
    name: {"model", "prototypes"}
    for name in ("fedproc", "fedproto", "fpl", "fedplvm", "i2pfl", "fedseproto", "fedmlp")
} | {
    "scaffold": {"model", "change"},
    "fedavg_ga": {"model", "scores"},
    "fedga": {"model", "scores"},
    "copa": {"model", "head"},
    "local": set(),
    "fedmd": {"logits"},
    "fedgh": {"prototypes"},
}
SLOTS_DOWN = {
    **SLOTS_UP,
    "fpl": {"model", "cluster"},
    "scaffold": {"model", "c"},
    "fedmlp": {"model", "prototypes", "semantic"},
    "fedavg_ga": {"model"},
    "fedga": {"model"},
    "copa": {"model", "heads"},
    "fedgh": {"model"},
}
BESIDE = {  # bytes sent beside the model, where they are no table of prototypes
    "scaffold": 4 * PARAMETERS,
    "fedavg_ga": SCORES,
    "fedga": SCORES,
    "copa": HEAD,
    "local": 0,
    "fedmd": LOGITS,
}
SERVER = {
    **SLOTS_DOWN,
    "fedavg_ga": {"model", "ga"},
    "fedga": {"model", "ga"},
    "feddyn": {"model", "h"},
    "fedopt": {"model", "v"},
    "fedavgm": {"model", "v"},
    "fedadam": {"model", "m", "v"},
    "fedmd": {"consensus"},
}


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


class Interrupt(Observer):
    def client(self, round, done, total):
        if (round, done) == (1, 2):
            raise KeyboardInterrupt


@pytest.fixture(scope="module", params=list(METHODS))
def whole(request, tmp_path_factory):
    """A method's name, its finished run with a folder, and what was sent in it."""
    recorder = Recorder()
    out = tmp_path_factory.mktemp(request.param) / "run"
    result = run("glyphs", request.param, out=out, observers=[recorder], **SMALL)
    return request.param, result, recorder


def size(content):
    """Bytes of a message, counted entry by entry."""
    return sum(t.detach().numpy().nbytes for slot in content.values() for t in slot.values())


def final_state(folder):
    """The server's state in a checkpoint, and every client's."""
    server, metadata = tree.load(folder / "checkpoint.safetensors")
    files = metadata["clients"]
    clients = {name: tree.load(folder / "clients" / file)[0] for name, file in files.items()}
    return metadata["round"], server, clients


def assert_same_state(a, b):
    (round_a, server_a, clients_a), (round_b, server_b, clients_b) = a, b
    assert round_a == round_b == 2
    assert tree.equal(server_a, server_b)
    assert clients_a.keys() == clients_b.keys()
    assert all(tree.equal(clients_a[c], clients_b[c]) for c in clients_a)


# ---- all methods × glyphs -----------------------------------------------------------------------


def test_everything_is_finite(whole):
    _, result, recorder = whole
    assert len(result.rounds) == 2
    for record in result.rounds:
        assert all(math.isfinite(v) for v in record["loss"].values())
        assert all(0 <= a <= 100 for a in record["accuracy"].values())
    server, clients = recorder.federation.server.state, recorder.federation.store.accept()
    for content in (server, *clients.values()):
        assert all(t.isfinite().all() for slot in content.values() for t in slot.values())


def test_two_runs_give_the_same_bits(whole, tmp_path):
    name, result, _ = whole
    again = run("glyphs", name, out=tmp_path / "run", **SMALL)
    assert tree.equal({"model": result.model}, {"model": again.model})
    assert without_times(result.rounds) == without_times(again.rounds)
    assert_same_state(final_state(result.folder), final_state(again.folder))


def test_an_interrupted_run_goes_on_to_the_same_bits(whole, tmp_path):
    name, result, _ = whole
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run("glyphs", name, out=out, observers=[Interrupt()], **SMALL)
    assert len(read_records(out / "rounds.jsonl")) == 1
    assert tree.load(out / "checkpoint.safetensors")[1]["round"] == 1
    resumed = run("glyphs", name, out=out, resume=True, **SMALL)
    assert tree.equal({"model": result.model}, {"model": resumed.model})
    assert without_times(read_records(out / "rounds.jsonl")) == without_times(result.rounds)
    assert_same_state(final_state(result.folder), final_state(out))


def test_recorded_bytes_are_the_sum_of_what_was_sent(whole):
    name, result, recorder = whole
    lines = (result.folder / "rounds.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == len(recorder.sent) == 2
    for round, (line, (received, replies)) in enumerate(zip(lines, recorder.sent, strict=True)):
        record = json.loads(line)
        assert record["clients"] == len(replies) == CLIENTS
        assert record["bytes_down"] == CLIENTS * size(received)
        assert record["bytes_up"] == sum(size(r.message) for r in replies.values())
        if name == "fedmd":  # a consensus from the second round on, and the round it is for
            assert size(received) == (LOGITS + 8 if round else 0)
            assert set(received) == ({"consensus"} if round else set())
        else:
            assert set(received) == SLOTS_DOWN.get(name, {"model"})
        for reply in replies.values():
            assert set(reply.message) == SLOTS_UP.get(name, {"model"})
            model = TRAVELS.get(name, MODEL)
            assert size({"model": reply.message.get("model", {})}) == model
            assert size({"model": received.get("model", {})}) == DOWN.get(name, MODEL)
            prototypes = size(reply.message) - model
            if name == "fedplvm":  # ragged: K × J means and their mask
                J = reply.message["prototypes"]["mask"].shape[1]
                assert prototypes == 4 * K * J * (D + 1)
            else:
                assert prototypes == BESIDE.get(name, TABLE if name in SLOTS_UP else 0)


def test_state_sizes_are_as_documented(whole):
    name, _, recorder = whole
    federation = recorder.federation
    assert set(federation.server.state) == SERVER.get(name, {"model"})
    parameters = 4 * sum(p.numel() for p in federation.make_network().parameters())
    assert parameters == 4 * PARAMETERS + MODULES.get(name, 0)
    kept = federation.store.accept()
    if name not in KEPT:
        assert kept == {}
        return
    assert set(kept) == set(federation.sites)
    for state in kept.values():
        assert size(state) == KEPT[name]
    for state in kept.values():
        assert {slot for slot, entries in state.items() if entries} == SLOTS_KEPT[name]


def test_what_a_client_keeps_never_travels(whole):
    name, _, recorder = whole
    private = {n for s in recorder.federation.store.accept().values() for n in s.get("model", {})}
    for received, replies in recorder.sent:
        for message in (received, *(r.message for r in replies.values())):
            assert not private & set(message.get("model", {}))
            assert not {"previous", "history", "g", "h", "c_m", "m", "v", "ga"} & set(message)
    assert bool(private) == (name in TRAVELS)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_sent_or_kept_in_bfloat16(name, tmp_path):
    """Where the network computes in it: prototypes and weights are float32 all the same."""
    recorder = Recorder()
    run("glyphs", name, out=tmp_path, observers=[recorder], **SMALL, precision="bf16")
    for received, replies in recorder.sent:
        states = [t for r in replies.values() for t in (r.message, r.mine)]
        for content in (received, *states):
            for slot, entries in content.items():
                for entry, value in entries.items():
                    wide = value.dtype in (torch.float32, torch.float64)
                    assert wide or not value.is_floating_point(), (slot, entry)
    for round in analysis.prototype_rounds(tmp_path):
        assert analysis.prototypes(tmp_path, round).sent


def test_batchnorm_counters_are_never_averaged(whole):
    name, result, recorder = whole
    counters = [n for n, t in result.model.items() if not t.is_floating_point()]
    stay = name in ("fedbn", "local", "fedmd", "fedgh")  # with the clients
    assert len(counters) == (0 if stay else 2)
    received = [received for received, _ in recorder.sent]
    after = [received[1].get("model", {}), result.model]
    for (_, replies), model in zip(recorder.sent, after, strict=True):
        for n in counters:
            sent = [int(r.message["model"][n]) for r in replies.values()]
            assert min(sent) < max(sent)  # a mean would show
            assert model[n].dtype == torch.int64
            assert int(model[n]) == max(sent)


# ---- the battery, on variants (tests/test_testing.py has every method as it stands) --------------


@pytest.mark.parametrize(
    "variant",
    [
        FedDyn(variant="reference"),
        FedAdam(variant="yogi"),
        Scaffold(momentum=0.9),
        FedProc(warmup=True, proto_pass="post"),
        FedAvgGA(metric="loss", holdout=0.3),
        FPL(cpcl_prototypes="global", upcr_prototypes="global", upcr_reduction="sum"),
        pytest.param(
            I2PFL(mixup="input", inter="cluster", detach=False, ema="as_text", gamma_max=True),
            marks=pytest.mark.slow,
        ),
        FedProto(share="prototypes"),
        FedGH(proto_pass="post", epochs=1),
        FedMD(public="left", digest_epochs=2, digest_batch=5),
        pytest.param(FedSeProto(kl="moments"), marks=pytest.mark.slow),
        pytest.param(FedSeProto(share="prototypes"), marks=pytest.mark.slow),
    ],
    ids=lambda m: m.name,
)
def test_the_battery_passes_for_variants(variant):
    assert not any(v.failed for v in check(variant))


# ---- words and numbers of the cards -------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_a_methods_file_names_its_paper_and_its_deviations(name):
    cls = METHODS[name]
    text = inspect.getdoc(sys.modules[cls.__module__])
    author = cls.paper.replace(" et al.", "").split(",")[0]
    venue, year = cls.paper.split(", ")[-1].rsplit(" ", 1)
    for word in (author, venue, year):
        assert word in text, word
    assert "Deviations" in text or "Where the paper" in text
    assert '"' in text  # the paper's title


def test_the_methods_are_those_of_the_cards():
    assert set(METHODS) == set(CARDS)
    assert all(name == cls.name for name, cls in METHODS.items())


LAST_EPOCH = {"proto_pass": "last_epoch"}
CARDS = {
    "fedavg": {},
    "fedprox": {"mu": 1e-4},
    "moon": {"mu": 5.0, "tau": 0.5},
    "feddyn": {"alpha": 0.01, "clip": 10.0, "variant": "correct"},
    "fedopt": {"eta_g": 0.25, "beta": 0.9},
    "fedavgm": {"beta": 0.9},
    "fedadam": {"eta_g": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "variant": "adam"},
    "fednova": {"rho": 0.9},
    "scaffold": {"eta_g": 1.0, "momentum": 0.0},
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
    "fedsr": {"c1": 0.01, "c2": 0.001, "samples": 20},
    "fedavg_ga": {"s0": 0.2, "metric": "accuracy", "holdout": 0.1},
    "fedga": {"mu": 1e-4, "s0": 0.2, "metric": "accuracy", "holdout": 0.1},
    "copa": {},
    "fedseproto": {
        "alpha": 1.0,
        "beta": 0.01,
        "lam": 1.0,
        "first_phase": 0.2,
        "kd_sign": "corrected",
        "kl": "unit",
        "proto_reduction": "mean",
        **LAST_EPOCH,
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
    "fedgh": {"eta": 0.01, "epochs": 10, "batch": 10, **LAST_EPOCH},
}
PER_TASK = {
    ("i2pfl", "office_caltech"): {"tau": 0.02},
    ("i2pfl", "pacs"): {"tau": 0.04, "alpha": 0.2, "lambda_intra": 2.0},
}


@pytest.mark.parametrize("task", ["", "digits", "office_caltech", "pacs", "vlcs", "glyphs"])
@pytest.mark.parametrize("name", list(CARDS))
def test_defaults_are_the_cards(name, task):
    expected = {**CARDS[name], **PER_TASK.get((name, task), {})}
    assert METHODS[name].defaults(task) == expected
    assert create(name, task=task).options() == expected


def test_what_is_typed_wins_over_the_tasks_default():
    method = create("i2pfl", {"tau": 0.5}, "pacs")
    assert (method.tau, method.alpha, method.lambda_intra) == (0.5, 0.2, 2.0)


def test_a_config_takes_the_defaults_of_its_task():
    assert make_config("glyphs", "i2pfl").method == I2PFL()
    assert make_config("glyphs", "i2pfl", {"tau": 0.5}).method == I2PFL(tau=0.5)
