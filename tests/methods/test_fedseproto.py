"""FedSeProto: its equations in plain numpy, its two phases, and what never leaves a client."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Domain, Images
from protofed.errors import Diverged, ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation, Observer
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, Entry, ServerView, Sizes, Update
from protofed.methods import FedAvg, FedSeProto
from protofed.methods.fedseproto import distillation
from protofed.models import Network, build
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

K, D = 3, 4
SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 0]
SHORT = {**TINY, "rounds": 2}
PRIVATE = ("domain.", "decoder.")
pytestmark = pytest.mark.usefixtures("single_thread")


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def toy(method, K=K, D=D):
    """A linear encoder under the method's modules, all weights moved off where they begin."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, D), nn.Tanh())
    net = method.network(Network(encoder, D, K), Sizes(K, D, 8)).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.add_(numbers(100 + i, *p.shape), alpha=0.1)
    return net


def prototypes(mask=(1, 1, 1)):
    """What lies under a 0 must not matter."""
    mask = torch.tensor(mask, dtype=torch.float32)
    rows = numbers(11, K, D).masked_fill(mask[:, None] == 0, 77.0)
    return {"prototypes": {"mean": rows, "mask": mask}}


C = prototypes()
NONE = FedSeProto().init_server({}, SIZES)


def scene(method, y=Y, received=C, net=None):
    net = net or toy(method)
    client = Client(method, net, SIZES, received=received, mine={}, round=1, rounds=3)
    client.begin_step(1)
    x = numbers(5, len(y), 3, 8, 8)
    return client, net, Batch(x, torch.tensor(y), torch.arange(len(y)))


# ---- the equations in numpy ---------------------------------------------------------------------


def array(t):
    return t.detach().numpy()


def linear(layer, x):
    return x @ array(layer.weight).T + array(layer.bias)


def features(net, x):
    """z, z^s, z^d."""
    z = np.tanh(linear(net.encoder[1], x.reshape(len(x), -1)))
    return z, linear(net.semantic, z), linear(net.domain, z)


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def divergence(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def divergences(net, x, teacher=None):
    """s1 and s2 of every sample; ``teacher`` holds H(z) constant."""
    z, z_s, z_d = features(net, x)
    teacher = linear(net.head, z) if teacher is None else teacher
    pairs = []
    for t, s, d in zip(teacher, linear(net.head, z_s), linear(net.head, z_d), strict=True):
        pairs.append((divergence(softmax(t), softmax(s)), divergence(softmax(t), softmax(d))))
    return np.array(pairs).T


def eq11(net, x, sign, teacher=None):
    s1, s2 = divergences(net, x, teacher)
    if sign == "corrected":
        s1, s2 = -s1, -np.minimum(s2, 50)
    pairs = zip(s1, s2, strict=True)
    return np.mean([-math.log(math.exp(a) / (math.exp(a) + math.exp(b))) for a, b in pairs])


def to_normal(z, kind):
    if kind == "unit":  # KL of N(z, 1) to N(0, 1) in each dimension
        return np.mean([v * v / 2 for row in z for v in row])
    total = 0.0
    for column in z.T:
        mu, variance = sum(column) / len(column), np.var(column) + 1e-6
        total += 0.5 * (mu**2 + variance - math.log(variance) - 1)
    return total / z.shape[1]


def transposed(layer, x):
    """A transposed convolution of 4×4, stride 2, padding 1, pixel by pixel."""
    W, n = array(layer.weight), x.shape[2]  # [in, out, 4, 4]
    out = np.zeros((len(x), W.shape[1], 2 * n + 2, 2 * n + 2))
    for i in range(n):
        for j in range(n):
            out[:, :, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] += np.einsum(
                "bi,iokl->bokl", x[:, :, i, j], W
            )
    return out[:, :, 1:-1, 1:-1] + array(layer.bias)[None, :, None, None]


def decoded(net, z_s, z_d):
    first, *others = [m for m in net.decoder if isinstance(m, nn.Linear | nn.ConvTranspose2d)]
    x = linear(first, np.concatenate([z_s, z_d], 1)).reshape(len(z_s), 128, 1, 1)
    for layer in others:
        x = transposed(layer, np.maximum(x, 0))
    return x


def eq10(net, x, kind):
    _, z_s, z_d = features(net, x)
    return to_normal(z_s, kind) + to_normal(z_d, kind) + ((decoded(net, z_s, z_d) - x) ** 2).mean()


def eq13(net, x, y, received, reduction):
    """Mean over classes of the mean over their samples, of the classes there are."""
    _, z_s, _ = features(net, x)
    C, mask = (array(received["prototypes"][n]) for n in ("mean", "mask"))
    classes = []
    for k in range(len(C)):
        own = [((z - C[k]) ** 2).sum() for z, c in zip(z_s, y, strict=True) if c == k]
        if own and mask[k]:
            classes.append(sum(own) / len(own))
    return sum(classes) / max(1, len(classes)) / (D if reduction == "mean" else 1)


# ---- the terms ----------------------------------------------------------------------------------


def test_ce_of_phase_2_is_of_the_semantic_branch_and_of_phase_1_of_the_general_one():
    client, net, batch = scene(FedSeProto())
    x = batch.x.numpy()
    z, z_s, _ = features(net, x)

    def ce(f):
        rows = linear(net.head, f)
        return -np.mean([math.log(softmax(r)[k]) for r, k in zip(rows, Y, strict=True)])

    terms = FedSeProto().loss(client, batch)
    assert list(terms) == ["ce", "kd", "mi_kl", "mi_error", "proto"]
    assert terms["ce"].item() == pytest.approx(ce(z_s), rel=1e-10)
    client.begin_step(2)
    first = FedSeProto().basic(client, batch)
    assert list(first) == ["basic"]
    assert first["basic"].item() == pytest.approx(ce(z), rel=1e-10)
    assert ce(z) != pytest.approx(ce(z_s), rel=1e-3)


@pytest.mark.parametrize("sign", ["corrected", "printed"])
def test_kd_is_eq_11(sign):
    method = FedSeProto(kd_sign=sign)
    client, net, batch = scene(method)
    got = method.loss(client, batch)["kd"].item()
    x = batch.x.numpy()
    assert got == pytest.approx(eq11(net, x, sign), rel=1e-10)
    assert got != pytest.approx(eq11(net, x, "printed" if sign == "corrected" else "corrected"))


def bent(s1, s2):
    """Two classes, z = 0 and an identity as head, so that s1 and s2 are what is asked for."""
    net = toy(FedSeProto(), K=2, D=2)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.head.weight.copy_(torch.eye(2))
        for layer, s in ((net.semantic, s1), (net.domain, s2)):
            layer.weight.copy_(torch.eye(2))
            # uniform against softmax(a, −a): KL = log cosh a
            a = math.log(2) + s if s > 30 else math.acosh(math.exp(s))
            layer.bias.copy_(torch.tensor([a, -a], dtype=torch.float64))
    return net


def kd_of(net, **options):
    method = FedSeProto(beta=0, lam=0, **options)
    client = Client(method, net, Sizes(2, 2, 8), received={}, mine={})
    client.begin_step(1)
    rows = torch.arange(4)
    return method.loss(client, Batch(numbers(5, 4, 3, 8, 8), rows % 2, rows))["kd"]


@pytest.mark.parametrize(
    ("s1", "s2", "corrected", "printed"),
    [
        (0, 3, 0.0486, 3.0486),
        (3, 0, 3.0486, 0.0486),
        (1, 1, 0.6931, 0.6931),
        (0, 0, 0.6931, 0.6931),
    ],
)
def test_the_cards_example(s1, s2, corrected, printed):
    net = bent(s1, s2)
    assert np.allclose(divergences(net, np.zeros((1, 3, 8, 8)))[:, 0], [s1, s2], atol=1e-9)
    assert kd_of(net).item() == pytest.approx(corrected, abs=5e-5)
    assert kd_of(net, kd_sign="printed").item() == pytest.approx(printed, abs=5e-5)
    assert kd_of(net, alpha=2.5).item() == pytest.approx(2.5 * kd_of(net).item(), rel=1e-12)


@pytest.mark.parametrize("sign", ["corrected", "printed"])
def test_minimizing_the_corrected_kd_lowers_s1_and_raises_s2(sign):
    net = bent(1.0, 1.0)
    x = np.zeros((1, 3, 8, 8))
    before = divergences(net, x)[:, 0]
    kd_of(net, kd_sign=sign).backward()
    with torch.no_grad():
        for p in (*net.semantic.parameters(), *net.domain.parameters()):
            p -= 0.1 * p.grad
    s1, s2 = divergences(net, x)[:, 0] - before
    assert (s1 < -0.01, s2 > 0.01) == (sign == "corrected",) * 2
    assert (s1 > 0.01, s2 < -0.01) == (sign == "printed",) * 2


def test_s2_is_cut_at_50_where_it_is_raised():
    for s2, cut in ((40, 40), (60, 50), (500, 50)):
        net = bent(100, s2)
        value = kd_of(net)
        assert value.item() == pytest.approx(100 - cut, rel=1e-9)  # softplus(s1 − s2)
        value.backward()
        assert bool(net.domain.bias.grad.any()) == (s2 < 50)  # beyond, nothing pushes it away
    assert kd_of(bent(500, 500)).item() == pytest.approx(450, rel=1e-9)  # s1 is not cut


@pytest.mark.parametrize("s2", [40, 60, 500])
def test_as_printed_s2_falls_from_wherever_it_is(s2):
    net = bent(0, s2)
    value = kd_of(net, kd_sign="printed")
    assert value.item() == pytest.approx(s2, rel=1e-9)  # softplus(s2)
    value.backward()
    assert net.domain.bias.grad.tolist() == pytest.approx([0.5, -0.5])  # softmax − (½, ½)


def test_the_printed_kd_of_a_domain_branch_that_is_far_away():
    teacher = torch.tensor([[60.0, -60.0]])  # as probabilities: (1, 0)
    domain = torch.tensor([[-40.0, 40.0]], requires_grad=True)
    distillation(teacher, teacher, domain, "printed").backward()
    assert domain.grad.tolist() == [pytest.approx([-1, 1])]


@pytest.mark.parametrize("kind", ["unit", "moments"])
def test_mi_is_eq_10(kind):
    method = FedSeProto(kl=kind, beta=1)
    client, net, batch = scene(method)
    terms = method.loss(client, batch)
    got = (terms["mi_kl"] + terms["mi_error"]).item()
    assert got == pytest.approx(eq10(net, batch.x.numpy(), kind), rel=1e-10)
    other = eq10(net, batch.x.numpy(), "unit" if kind == "moments" else "moments")
    assert got != pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("kind", ["unit", "moments"])
def test_mi_of_a_batch_of_one_is_finite(kind):
    method = FedSeProto(kl=kind)
    client, net, batch = scene(method, [1])
    torch.stack(list(method.loss(client, batch).values())).sum().backward()
    grads = [p.grad for n, p in net.named_parameters()]
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_proto_is_eq_13_and_no_batch_mean(reduction):
    method = FedSeProto(proto_reduction=reduction)
    client, net, batch = scene(method)
    got = method.loss(client, batch)["proto"].item()
    assert got == pytest.approx(eq13(net, batch.x.numpy(), Y, C, reduction), rel=1e-10)
    _, z_s, _ = features(net, batch.x.numpy())  # classes of 3, 1 and 2 samples: it does differ
    squares = ((z_s - array(C["prototypes"]["mean"])[Y]) ** 2).sum(1)
    assert got != pytest.approx(squares.mean() / (D if reduction == "mean" else 1), rel=1e-2)


@pytest.mark.parametrize(
    ("y", "mask"),
    [([0, 0, 2], (1, 1, 1)), (Y, (1, 0, 1)), ([1, 1, 2], (1, 0, 1)), ([1, 1], (1, 0, 1))],
)
def test_classes_without_samples_or_prototype_are_no_part_of_the_mean(y, mask):
    received = prototypes(mask)
    client, net, batch = scene(FedSeProto(), y, received)
    term = FedSeProto().loss(client, batch)["proto"]
    expected = eq13(net, batch.x.numpy(), y, received, "mean")
    assert term.item() == pytest.approx(expected, rel=1e-10)
    assert (term.item() > 0) == any(mask[k] for k in y)


def test_round_0_has_no_proto():
    client, net, batch = scene(FedSeProto(), received=NONE)
    term = FedSeProto().loss(client, batch)["proto"]
    assert term.item() == 0
    grads = torch.autograd.grad(term, list(net.semantic.parameters()))
    assert not any(g.any() for g in grads)


def test_weights_scale_their_own_term_and_0_removes_it():
    client, _, batch = scene(FedSeProto())
    one = FedSeProto(alpha=1, beta=1, lam=1).loss(client, batch)
    terms = {"alpha": {"kd"}, "beta": {"mi_kl", "mi_error"}, "lam": {"proto"}}
    for weight, own in terms.items():
        scaled = FedSeProto(**{"alpha": 1, "beta": 1, "lam": 1, weight: 0.25})
        client.begin_step(1)
        got = scaled.loss(client, batch)
        for name, value in got.items():
            factor = 0.25 if name in own else 1
            assert value.item() == pytest.approx(factor * one[name].item(), rel=1e-12)
        client.begin_step(1)
        without = FedSeProto(**{weight: 0}).loss(client, batch)
        assert set(without) == set(one) - own
    client.begin_step(1)
    assert set(FedSeProto(alpha=0, beta=0, lam=0).loss(client, batch)) == {"ce"}


# ---- gradients ----------------------------------------------------------------------------------


def moved(net, term):
    """Which modules a term trains, and its gradient by name."""
    names = [n for n, _ in net.named_parameters()]
    grads = torch.autograd.grad(term, list(net.parameters()), allow_unused=True, retain_graph=True)
    return {n: g for n, g in zip(names, grads, strict=True) if g is not None}


@pytest.mark.parametrize(
    ("term", "options"),
    [
        ("ce", {}),
        ("kd", {"kd_sign": "corrected"}),
        ("kd", {"kd_sign": "printed"}),
        ("mi", {"kl": "unit"}),
        ("mi", {"kl": "moments"}),
        ("proto", {}),
        ("proto", {"proto_reduction": "sum"}),
    ],
)
def test_gradient_in_the_weights_of_phase_2(term, options):
    method = FedSeProto(alpha=1, beta=1, lam=1, **options)
    client, net, batch = scene(method)
    terms = method.loss(client, batch)
    wanted = [value for name, value in terms.items() if name.startswith(term)]
    grads = moved(net, torch.stack(wanted).sum())
    x = batch.x.numpy()
    teacher = linear(net.head, features(net, x)[0])  # held constant in the differences too

    def value():
        if term == "kd":
            return eq11(net, x, method.kd_sign, teacher)
        if term == "mi":
            return eq10(net, x, method.kl)
        if term == "proto":
            return eq13(net, x, Y, C, method.proto_reduction)
        logits = linear(net.head, features(net, x)[1])
        return -np.mean([math.log(softmax(r)[k]) for r, k in zip(logits, Y, strict=True)])

    rng = np.random.default_rng(3)
    parameters = dict(net.named_parameters())
    trained = method.phases(1, 10)[1].trainable
    for name in (n for n in parameters if trained(n)):
        p = parameters[name]
        grad = grads.get(name, torch.zeros_like(p))
        for _ in range(3):
            index = tuple(int(rng.integers(n)) for n in p.shape)
            kept = p.data[index].item()
            p.data[index] = kept + 1e-6
            up = value()
            p.data[index] = kept - 1e-6
            down = value()
            p.data[index] = kept
            assert grad[index].item() == pytest.approx((up - down) / 2e-6, abs=2e-7), name


def test_which_term_reaches_which_module():
    client, net, batch = scene(FedSeProto())
    reach = {
        t: {n.split(".")[0] for n in moved(net, v)} - {"head"}
        for t, v in FedSeProto().loss(client, batch).items()
    }
    assert reach == {
        "ce": {"encoder", "semantic"},
        "kd": {"encoder", "semantic", "domain"},
        "mi_kl": {"encoder", "semantic", "domain"},
        "mi_error": {"encoder", "semantic", "domain", "decoder"},
        "proto": {"encoder", "semantic"},
    }


def test_the_teacher_is_held_constant():
    # semantic and domain encoders that forget z: without the teacher nothing depends on F
    client, net, batch = scene(FedSeProto())
    with torch.no_grad():
        net.semantic.weight.zero_()
        net.domain.weight.zero_()
    grads = moved(net, FedSeProto().loss(client, batch)["kd"])
    assert not any(g.any() for n, g in grads.items() if n.startswith("encoder."))
    assert grads["semantic.bias"].any()
    assert FedSeProto().detached_terms == ("kd",)


@pytest.mark.parametrize("step", [0.1, 30.0])
def test_decoder_step_scales_the_gradient_of_the_decoder_and_of_nothing_else(step):
    plain, scaled = FedSeProto(), FedSeProto(decoder_step=step)
    terms, grads = [], []
    for method in (plain, scaled):
        client, net, batch = scene(method)
        terms.append({n: t.item() for n, t in method.loss(client, batch).items()})
        client.begin_step(1)
        grads.append(moved(net, torch.stack([*method.loss(client, batch).values()]).sum()))
    assert terms[0] == terms[1]
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        factor = step if name.startswith("decoder.") else 1
        assert grad.any()
        assert torch.allclose(grads[1][name], factor * grad, rtol=1e-9, atol=1e-15), name
    assert scaled.detached_terms == ("kd", "mi_error")  # its gradient is not that of its value


# ---- the two phases -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "first", "second"), [(1, 1, 1), (2, 1, 1), (5, 1, 4), (10, 2, 8), (20, 4, 16)]
)
def test_length_of_the_phases(epochs, first, second):
    for round in (0, 7):
        phases = FedSeProto().phases(round, epochs)
        assert [p.epochs for p in phases] == [first, second]
    assert phases[0].loss.__name__ == "basic"
    assert phases[1].loss.__name__ == "loss"
    half = FedSeProto(first_phase=0.5).phases(0, 10)
    assert [p.epochs for p in half] == [5, 5]


def test_what_each_phase_may_train():
    names = [n for n, _ in toy(FedSeProto()).named_parameters()]
    modules = {n.split(".")[0] for n in names}
    assert modules == {"encoder", "semantic", "domain", "head", "decoder"}
    first, second = FedSeProto().phases(0, 10)
    assert {n.split(".")[0] for n in names if first.trainable(n)} == {"encoder", "head"}
    assert {n.split(".")[0] for n in names if second.trainable(n)} == modules - {"head"}


def federation(method=None, task=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or FedSeProto(), **{**SHORT, **settings}), task)


def trained(fed, method=None, received=None, round=0):
    """A client's reply, and its whole model before and after."""
    site = next(iter(fed.clients.values()))
    setup = replace(fed.setup, method=method or fed.method)
    received = received or fed.server.broadcast()
    mine = fed.store.get(site.name)
    before = {**mine["model"], **received["model"]}
    reply = train_client(setup, fed.engine.networks["cnn2"], site, received, mine, round)
    after = {**reply.mine["model"], **reply.message["model"]}
    return reply, before, after


@dataclass(frozen=True)
class Only(FedSeProto):
    """One of the two phases."""

    which: int = 0

    def phases(self, round, epochs):
        return (super().phases(round, epochs)[self.which],)


@pytest.mark.parametrize("which", [0, 1])
def test_each_phase_really_trains_that_and_nothing_else(which):
    fed = federation()
    fed.run_round()  # with prototypes, and a semantic encoder that is no identity any more
    _, before, after = trained(fed, Only(which=which), round=1)
    assert before.keys() == after.keys()
    parameters = {n for n, _ in fed.engine.networks["cnn2"].named_parameters()}
    changed = {n for n in parameters if not torch.equal(before[n], after[n])}
    expected = ("encoder.", "head.") if which == 0 else ("encoder.", "semantic.", "domain.", "deco")
    assert changed == {n for n in parameters if n.startswith(expected)}
    assert all(p.requires_grad for p in fed.engine.networks["cnn2"].parameters())


def test_a_term_that_is_off_leaves_its_modules_alone():
    fed = federation(FedSeProto(beta=0))
    _, before, after = trained(fed)
    same = {n for n in before if torch.equal(before[n], after[n])}
    assert {n for n in before if n.startswith("decoder.")} <= same
    assert not any(n.startswith("domain.") for n in same)
    fed = federation(FedSeProto(alpha=0, beta=0, lam=0))
    _, before, after = trained(fed)
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(PRIVATE))


def test_number_of_steps_is_that_of_both_phases():
    reply, *_ = trained(federation(epochs=5))
    assert reply.steps == 5 * 3  # 22 samples in batches of 8
    assert set(reply.losses) == {"basic", "ce", "kd", "mi_kl", "mi_error", "proto"}
    assert reply.losses["proto"][0] == 0
    assert trained(federation(epochs=1))[0].steps == 2 * 3  # at least one epoch each


# ---- the network --------------------------------------------------------------------------------


@pytest.mark.parametrize("pixels", [8, 32])
@pytest.mark.parametrize("model", ["cnn2", "cnn3", "resnet10"])
def test_network_for_all_models_and_image_sizes(model, pixels):
    torch.manual_seed(1)
    backbone = build(model, 4, pixels, 8, None)
    x = torch.randn(3, 3, pixels, pixels)
    backbone.eval()
    feature, logits = (t.detach() for t in backbone(x))
    sizes = Sizes(4, backbone.features, pixels)
    net = FedSeProto().network(backbone, sizes).eval()
    out = net(x)
    assert net.decoder(torch.cat([out.feature, out.domain], 1)).shape == x.shape
    # the semantic encoder begins as the identity: at first this is the backbone itself
    assert torch.equal(net.semantic.weight, torch.eye(backbone.features))
    assert not net.semantic.bias.any()
    assert torch.allclose(out.feature, feature, rtol=1e-6)
    assert torch.allclose(out.logits, logits, rtol=1e-4, atol=1e-5)
    assert out.general.shape == out.domain.shape == feature.shape
    assert not torch.allclose(out.domain, out.general, atol=1e-2)
    received = {"prototypes": {"mean": torch.randn(4, backbone.features), "mask": torch.ones(4)}}
    client = Client(FedSeProto(), net.train(), sizes, received=received, mine={})
    client.begin_step(1)
    batch = Batch(x, torch.tensor([0, 1, 3]), torch.arange(3))
    torch.stack(list(FedSeProto().loss(client, batch).values())).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def of_size(pixels):
    """The tiny task with each image enlarged (or cut) to so many pixels."""
    task = tiny_task()

    def sized(images):
        x = images.x.repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :pixels, :pixels]
        return Images(x.contiguous(), images.y)

    domains = {n: Domain(sized(d.train), sized(d.test)) for n, d in task.domains.items()}
    return replace(task, domains=domains)


@pytest.mark.parametrize("model", ["cnn3", "resnet10"])
def test_runs_with_the_other_models(model):
    settings = {**SHORT, "model": model, "width": 8, "epochs": 1}
    result = run(of_size(32) if model == "cnn3" else tiny_task(), FedSeProto(), **settings)
    assert all(t.isfinite().all() for t in result.model.values())
    assert result.rounds[1]["loss"]["proto"] > 0


@pytest.mark.parametrize("pixels", [12, 20])
def test_an_image_size_the_decoder_cannot_make_is_told_in_words(pixels):
    with pytest.raises(ProtofedError) as error:
        run(of_size(pixels), FedSeProto(), **SHORT)
    text = str(error.value)
    assert f"{pixels}×{pixels}" in text
    assert "multiple of 8" in text
    assert "FedSeProto" in text


def test_encoder_and_head_begin_as_fedavgs():
    ours, plain = (
        Federation(make_config(tiny_task(), m, **TINY), tiny_task()).make_network().state_dict()
        for m in (FedSeProto(), FedAvg())
    )
    assert set(ours) - set(plain) == {n for n in ours if n.startswith(("semantic.", *PRIVATE))}
    assert all(torch.equal(ours[n], t) for n, t in plain.items())


# ---- what travels, and what never does ----------------------------------------------------------


def test_only_the_domain_encoder_and_the_decoder_stay():
    for name in federation().engine.networks["cnn2"].state_dict():
        kept = FedSeProto().shared(Entry(name, "weight")) == "no"
        assert kept == name.startswith(PRIVATE)


def contained(needle, tree_, path):
    """Whether the bytes of a tensor are anywhere in the file or message of a Tree."""
    tree.save(tree_, path)
    return needle.detach().cpu().contiguous().numpy().tobytes() in path.read_bytes()


def test_the_private_modules_are_in_no_message_by_name_and_by_bytes(tmp_path):
    fed = federation()
    for round in range(2):
        received = fed.server.broadcast()
        for name, site in fed.clients.items():
            before = fed.store.get(name)
            reply = train_client(
                fed.setup, fed.engine.networks["cnn2"], site, received, before, round
            )
            assert set(reply.message) == {"model", "prototypes"}
            assert set(reply.message["prototypes"]) == {"mean", "count"}
            assert not [n for n in reply.message["model"] if n.startswith(PRIVATE)]
            shared = {
                n for n in fed.engine.networks["cnn2"].state_dict() if not n.startswith(PRIVATE)
            }
            assert reply.message["model"].keys() == shared
            assert (
                reply.mine["model"].keys()
                == fed.engine.networks["cnn2"].state_dict().keys() - shared
            )
            # a needle that must be found, so that the search is known to find
            path = tmp_path / "message"
            assert contained(reply.message["model"]["semantic.weight"], reply.message, path)
            for state in (before, reply.mine):
                for t in state["model"].values():
                    assert not contained(t, reply.message, path)
        fed.run_round()
        for content in (fed.server.state, fed.server.broadcast()):
            assert set(content) == {"model", "prototypes"}
            assert content["model"].keys() == shared
            for name in fed.clients:
                for t in fed.store.get(name)["model"].values():
                    assert not contained(t, content, tmp_path / "server")


def test_bytes_are_those_of_the_shared_part():
    fed = federation()
    state = fed.engine.networks["cnn2"].state_dict()
    shared = sum(t.nbytes for n, t in state.items() if not n.startswith(PRIVATE))
    private = sum(t.nbytes for n, t in state.items() if n.startswith(PRIVATE))
    table = 4 * (4 * 512 + 4)  # K × d means and K counts or masks, float32
    record = fed.run_round()
    assert record["bytes_up"] == 4 * (shared + table)
    assert record["bytes_down"] == 4 * (shared + table)
    for name in fed.clients:
        assert tree.nbytes(fed.store.get(name)) == private


def test_private_modules_differ_between_clients_and_wait_for_those_who_sit_out():
    fed = federation(participation=0.5, rounds=4)
    begin = fed.store.get("left-0")["model"]
    assert set(begin) == {
        n for n in fed.engine.networks["cnn2"].state_dict() if n.startswith(PRIVATE)
    }
    ever = set()
    for _ in range(4):
        before = {n: fed.store.get(n)["model"] for n in fed.clients}
        present = fed.server.sample()
        ever |= set(present)
        fed.run_round()
        for name in fed.clients:
            same = tree.equal({"m": before[name]}, {"m": fed.store.get(name)["model"]})
            assert same == (name not in present)
    weights = {n: fed.store.get(n)["model"]["domain.weight"] for n in ever}
    assert len(ever) >= 3
    assert len({t.numpy().tobytes() for t in weights.values()}) == len(ever)


def test_a_clients_next_round_starts_from_its_own_private_modules():
    fed = federation()
    fed.run_round()
    site = next(iter(fed.clients.values()))
    mine, received = fed.store.get(site.name), fed.server.broadcast()
    args = (fed.setup, fed.engine.networks["cnn2"], site, received)
    one = train_client(*args, mine, 1)
    other = train_client(*args, {"model": {n: t + 0.1 for n, t in mine["model"].items()}}, 1)
    for name, of in (("domain.weight", "mine"), ("semantic.weight", "message")):
        assert not torch.equal(*(getattr(reply, of)["model"][name] for reply in (one, other)))


class Stop(Observer):
    def client(self, round, done, total):
        if round == 2 and done == 2:
            raise KeyboardInterrupt


class Keep(Observer):
    def start(self, federation, records):
        self.federation = federation


# ---- inference ----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
def test_prediction_is_the_semantic_branch_and_needs_nothing_private(poison):
    fed = federation()
    fed.run_round()
    network, server = fed.engine.networks["cnn2"], fed.server.state["model"]
    private = {n: t for n, t in network.state_dict().items() if n.startswith(PRIVATE)}
    load_model(network, server | {n: torch.full_like(t, poison) for n, t in private.items()})
    network.eval()
    client = Client(fed.method, network, fed.sizes, received=fed.server.broadcast(), mine={})
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = fed.method.predict(client, x)
        z = network.encoder(x)
    z_s = array(z) @ array(server["semantic.weight"]).T + array(server["semantic.bias"])
    expected = z_s @ array(server["head.weight"]).T + array(server["head.bias"])
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)
    general = array(z) @ array(server["head.weight"]).T + array(server["head.bias"])
    assert not np.allclose(got, general, atol=1e-3)


@dataclass(frozen=True)
class Wrong(FedSeProto):
    """Predicts with what the server does not have."""

    def predict(self, client, x):
        out = client.forward(x)
        return client.network.head(out.domain)


def test_a_prediction_that_needs_private_modules_is_found_out():
    assert federation().evaluate()["accuracy"].keys() == {"left", "right"}
    with pytest.raises(ProtofedError, match="predicts with entries that clients keep"):
        federation(Wrong()).evaluate()


def test_a_model_that_diverged_is_not_taken_for_one_that_needs_private_modules():
    """Its entries are numbers, but the scores are none, whatever the private entries are."""
    diverged = federation()
    model = diverged.server.state["model"]
    diverged.server.state["model"] = {
        n: t * 1e30 if t.is_floating_point() else t for n, t in model.items()
    }
    with pytest.raises(Diverged, match="not finite"):
        diverged.evaluate()


# ---- prototypes ---------------------------------------------------------------------------------


def test_prototypes_are_of_the_semantic_features():
    fed = federation()
    fed.run_round()
    reply, _, after = trained(fed, round=1)
    site = next(iter(fed.clients.values()))
    load_model(fed.engine.networks["cnn2"], after)
    fed.engine.networks["cnn2"].eval()
    augment = fed.task.augment
    mean, std = (torch.tensor(v)[:, None, None] for v in (augment.mean, augment.std))
    with torch.no_grad():
        z = fed.engine.networks["cnn2"].encoder((site.images.x / 255 - mean) / std)
        z_s = fed.engine.networks["cnn2"].semantic(z)
    sent = reply.message["prototypes"]
    for k in range(4):
        own = site.images.y == k
        assert sent["count"][k] == own.sum()
        assert torch.allclose(sent["mean"][k], z_s[own].mean(0), rtol=1e-3, atol=1e-4)
        assert not torch.allclose(sent["mean"][k], z[own].mean(0), atol=1e-2)


def test_prototypes_of_the_last_epoch_count_every_sample_once():
    client, net, batch = scene(FedSeProto())
    client.begin_prototypes()
    FedSeProto().loss(client, batch)
    client.collect(batch.y)
    message, private = FedSeProto().upload(client)
    assert private == {}
    _, z_s, _ = features(net, batch.x.numpy())
    for k in range(K):
        own = [z for z, c in zip(z_s, Y, strict=True) if c == k]
        assert np.allclose(message["prototypes"]["mean"][k], np.mean(own, 0), rtol=1e-10)
    reply, *_ = trained(federation(FedSeProto(proto_pass="last_epoch"), epochs=5))
    assert int(reply.message["prototypes"]["count"].sum()) == 22


def test_global_prototypes_are_eq_3():
    rows = numbers(7, 3, K, D)
    owners = {0: (0, 1, 2), 1: (2,), 2: ()}
    spool, updates = Spool(), []
    for m in range(3):
        count = torch.tensor([float((1 + 10 * m) * (m in owners[k])) for k in range(K)])
        spool.put(f"m{m}", {"prototypes": {"mean": rows[m], "count": count}})
        updates.append(Update(f"m{m}", int(count.sum()), 1, 0.1, spool))
    server = ServerView(NONE, 0, 3, ("m0", "m1", "m2"), SIZES)
    new = FedSeProto().aggregate(server, {"w": torch.ones(2)}, updates)
    assert set(new) == {"model", "prototypes"}
    assert new["model"]["w"].tolist() == [1, 1]
    mean, mask = new["prototypes"]["mean"], new["prototypes"]["mask"]
    assert torch.allclose(mean[0], (rows[0, 0] + rows[1, 0] + rows[2, 0]) / 3, rtol=1e-12)
    assert torch.equal(mean[1], rows[2, 1])
    assert mask.tolist() == [1, 1, 0]


def test_a_run_with_missing_classes_and_one_client():
    task = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    result = run(task, FedSeProto(), **SHORT)
    assert all(t.isfinite().all() for t in result.model.values())
    assert result.rounds[0]["loss"]["proto"] == 0
    assert result.rounds[1]["loss"]["proto"] > 0
    alone = run(tiny_task(), FedSeProto(), **{**SHORT, "clients": {"left": 1}})
    assert all(t.isfinite().all() for t in alone.model.values())


# ---- hyper-parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1},
        {"beta": -0.1},
        {"lam": -1},
        {"decoder_step": 0},
        {"first_phase": 0},
        {"first_phase": 1.5},
        {"kd_sign": "wrong"},
        {"kl": "none"},
        {"proto_reduction": "max"},
        {"proto_pass": "none"},
    ],
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        FedSeProto(**wrong)
