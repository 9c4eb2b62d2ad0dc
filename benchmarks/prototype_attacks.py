"""What prototypes reveal to the server that receives them: three attacks, and what stops them.

    python benchmarks/prototype_attacks.py [--trials 12] [--out DIR]

The victim is a client of FPL with images of the domain `scan` of `glyphs`; its messages are those
of `train_client`. The server has images of its own: some of the other domains, and 30 images of
each class of `scan` that no client holds.

    reconstruction   The server chooses a small CNN, one epoch, a tiny learning rate, a clean pass
                     (`proto_pass=post`), and weights that it trained, with a decoder, to encode
                     images; it decodes the prototype of a class with n images. *Found*: of 40
                     images of the class, the one most like the decoded image is the client's.
    membership       With an honest model: is this image one of the n of its class? The score is
                     <f(x) - m, p - m>, p the prototype and m the mean of the server's own images of
                     the class. *AUC*: 0.5 is guessing, 1 is certainty.
    property         With an honest model: are 30 of the client's 100 images from a second domain,
                     `photo`? A logistic regression on prototypes of shadow clients that the server
                     makes of its own images. *Right*: of 60 clients; half have the property.

Budgets are spent whole in the one message that is attacked: a server that repeats its question, or
waits for the last round, gets no more. The decoded images are drawn to `reconstruction.png`.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from protofed.config import make_config
from protofed.data import Images, load_task
from protofed.data.augment import normalized
from protofed.federation.client_round import train_client
from protofed.federation.cpu import one_thread
from protofed.federation.privacy import Privacy, make_privacy
from protofed.federation.setup import ClientData
from protofed.federation.simulation import Federation
from protofed.models import Network
from protofed.tree import Tree

DOMAIN, SECOND, CLASSES, OWN = "scan", "photo", 10, 40
"""The victim's domain, the one that is mixed in, images of a class that clients may hold."""
EPSILONS = (1000.0, 100.0, 10.0, 1.0)


class World:
    """The federation whose messages are attacked, and everybody's images."""

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        task, settings = load_task("glyphs"), {**settings, "rounds": 1}
        config = make_config("glyphs", "fpl", options, engine="loop", device="cpu", **settings)
        self.federation = Federation(config, task)
        self.setup, self.rng = self.federation.setup, np.random.default_rng(0)
        self.pool = {d: self._by_class(d, task) for d in task.domains}
        """The images [K, N, 3, 32, 32] of each domain."""
        self.clients_have = {d: x[:, : x.shape[1] * OWN // 70] for d, x in self.pool.items()}
        self.server_has = {d: x[:, x.shape[1] * OWN // 70 :] for d, x in self.pool.items()}

    def _by_class(self, domain: str, task: Any) -> Tensor:
        parts = (task.domains[domain].train, task.domains[domain].test)
        x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
        return torch.stack([x[y == k] for k in range(CLASSES)])

    def network(self) -> Network:
        return self.federation.make_network()

    def received(self, network: Network) -> Tree:
        state = {n: t.clone() for n, t in network.state_dict().items()}
        return {**self.federation.server.broadcast(), "model": state}

    def message(
        self, received: Tree, x: Tensor, y: Tensor, trial: int, least: int, epsilon: float | None
    ) -> Tree:
        """What a client with these images sends."""
        network = self.network()
        privacy = Privacy()
        if epsilon is not None:
            asked = replace(self.federation.config, proto_epsilon=epsilon)
            privacy = make_privacy(asked, network, self.setup.sizes)
        setup = replace(self.setup, privacy=privacy, min_class_count=least, seed=trial)
        if epsilon is not None:  # these prototypes come before training: no need for all of it
            setup = replace(setup, training=replace(setup.training, epochs=1))
        data = ClientData("victim", DOMAIN, Images(x, y))
        return train_client(setup, network, data, received, {}, 0).message

    def features(self, model: dict[str, Tensor], x: Tensor) -> Tensor:
        network = self.network()
        network.load_state_dict(model)
        with torch.no_grad():
            return network.eval()(self.inputs(x)).feature  # type: ignore[no-any-return]

    def inputs(self, x: Tensor) -> Tensor:
        return normalized(x, self.setup.augment, torch.float32)


def shifted(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Images [B, ...] cropped at random after padding, as clients train on them."""
    padded = F.pad(x, (4, 4, 4, 4))
    at = rng.integers(0, 9, (len(x), 2))
    return torch.stack([padded[i, :, r : r + 32, c : c + 32] for i, (r, c) in enumerate(at)])


def labeled(each: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Images and labels of a client that has these of each class."""
    y = torch.cat([torch.full((len(x),), k) for k, x in enumerate(each)])
    return torch.cat(list(each)), y


def images(n: int) -> str:
    return "1 image" if n == 1 else f"{n} images"


# ---- reconstruction ------------------------------------------------------------------------------


def hostile_world() -> World:
    """A federation with the settings that the server chooses."""
    chosen = {"model": "cnn2", "width": 8, "norm": "none", "epochs": 1, "lr": 1e-6}
    return World({"proto_pass": "post"}, **chosen)


def crafted(world: World, steps: int) -> tuple[Tree, nn.Module]:
    """Weights that encode an image in its feature, and the decoder.

    Features are as long as the clipping of --proto-epsilon allows: so they stand out from noise.
    """
    torch.manual_seed(0)
    network, rng = world.network(), world.rng
    decoder = nn.Sequential(nn.Linear(network.features, 1024), nn.ReLU(), nn.Linear(1024, 32 * 32))
    optimizer = torch.optim.Adam([*network.parameters(), *decoder.parameters()], 1e-3)
    sets = [x.flatten(0, 1) for x in world.server_has.values()]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        own = sets[step % len(sets)] if step % 2 else world.server_has[DOMAIN].flatten(0, 1)
        x = own[rng.integers(0, len(own), 64)]
        x = shifted(x, rng) if step % 4 < 2 else x
        loss = F.mse_loss(decoder(network(world.inputs(x)).feature), gray(x).flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"crafted weights: {steps} steps, squared error {loss.item():.4f}", flush=True)
    own = world.server_has[DOMAIN].flatten(0, 1)
    with torch.no_grad():
        length = network(world.inputs(own)).feature.norm(dim=1).quantile(0.9)
        longer = world.federation.config.proto_clip / float(length)
        for t in network.encoder[-2].parameters():  # type: ignore[index]
            t.mul_(longer)
        decoder[0].weight.div_(longer)
    return world.received(network), decoder


def gray(x: Tensor) -> Tensor:
    return x.float().mean(1) / 255


def distances(decoded: Tensor, candidates: Tensor) -> Tensor:
    """The squared distance of the decoded image to each candidate [N]."""
    return (gray(candidates) - decoded).square().mean((1, 2))


def reconstruction(world: World, trials: int, steps: int, out: Path) -> None:
    received, decoder = crafted(world, steps)
    own, images_of = world.clients_have[DOMAIN], list[Tensor]()
    drawn: dict[str, list[Tensor | None]] = {}
    cases: list[tuple[str, int, int, float | None]] = [
        *((f"{images(n)} of the class", n, 1, None) for n in (1, 2, 5, 10)),
        ("1 image, min_class_count 2", 1, 2, None),
        *((f"1 image, ε {e:g}", 1, 1, e) for e in EPSILONS),
        *((f"10 images, ε {e:g}", 10, 1, e) for e in EPSILONS),
    ]
    for label, n, least, epsilon in cases:
        found, sent, total = 0, 0, 0
        for trial in range(trials):
            rng = np.random.default_rng(trial)
            few = rng.permutation(CLASSES)[:5]  # the other classes have 12 images
            rows_of = [rng.permutation(OWN)[: n if k in few else 12] for k in range(CLASSES)]
            x, y = labeled([own[k][rows_of[k]] for k in range(CLASSES)])
            message = world.message(received, x, y, trial, least, epsilon)["prototypes"]
            for k in few:
                total += 1
                decoded_each = drawn.setdefault(label, [])
                if label == cases[0][0]:
                    images_of.append(gray(own[k][rows_of[k]])[0])
                if message["count"][k] <= 0:
                    decoded_each.append(None)
                    continue
                sent += 1
                with torch.no_grad():
                    decoded = decoder(message["mean"][k][None]).view(32, 32)
                best = int(distances(decoded, own[k]).argmin())
                found += best in rows_of[k]
                decoded_each.append(decoded)
        numbers = f"sent {sent:2} of {total} classes, found {found / total:4.0%}"
        show("reconstruction", label, f"{numbers}, by chance {n / OWN:.1%}")
    draw(images_of, drawn, out / "reconstruction.png")


def draw(images_of: list[Tensor], drawn: dict[str, list[Tensor | None]], path: Path) -> None:
    """A column for each of the ten images that the most cases send something of."""
    from matplotlib import pyplot

    times_sent = [
        sum(image is not None for image in each) for each in zip(*drawn.values(), strict=True)
    ]
    chosen = np.argsort(-np.array(times_sent), kind="stable")[:10]
    rows: dict[str, list[Tensor | None]] = {
        label: [each[i] for i in chosen]
        for label, each in {"an image of the client": images_of, **drawn}.items()
    }
    rows = {label: row for label, row in rows.items() if any(image is not None for image in row)}
    size = (2.1 + 0.6 * len(chosen), 0.62 * len(rows))
    figure, axes = pyplot.subplots(len(rows), len(chosen), figsize=size, squeeze=False)
    figure.subplots_adjust(
        left=2.0 / size[0], right=0.995, top=0.99, bottom=0.01, wspace=0.05, hspace=0.05
    )
    for (label, row), line in zip(rows.items(), axes, strict=True):
        for image, axis in zip(row, line, strict=True):
            axis.set_axis_off()
            if image is None:
                axis.text(0.5, 0.5, "not\nsent", ha="center", va="center", fontsize=7, color="gray")
            else:
                axis.imshow(image.clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        middle = (line[0].get_position().y0 + line[0].get_position().y1) / 2
        figure.text(0.01, middle, label, va="center", fontsize=8)
    figure.savefig(path, dpi=130)


# ---- membership ----------------------------------------------------------------------------------


def honest(world: World, steps: int) -> Tree:
    """A model trained to classify the server's own images."""
    torch.manual_seed(0)
    network, rng = world.network(), world.rng
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)
    x, y = (
        torch.cat(p) for p in zip(*(labeled(x) for x in world.server_has.values()), strict=True)
    )
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(0, len(x), 64))
        loss = F.cross_entropy(network(world.inputs(shifted(x[rows], rng))).logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"honest weights: {steps} steps, cross-entropy {loss.item():.3f}", flush=True)
    return world.received(network)


def membership(world: World, received: Tree, trials: int) -> None:
    own = world.clients_have[DOMAIN]
    cases: list[tuple[str, int, int, float | None]] = [
        *((f"{images(n)} of the class", n, 1, None) for n in (1, 2, 5, 10, 20)),
        ("1 image, min_class_count 2", 1, 2, None),
        *((f"{images(n)}, ε {e:g}", n, 1, e) for n in (1, 10) for e in EPSILONS),
    ]
    for label, n, least, epsilon in cases:
        scores, members, sent = [], [], 0
        for trial in range(trials):
            rng = np.random.default_rng(trial)
            order = np.stack([rng.permutation(OWN) for _ in range(CLASSES)])
            few = rng.permutation(CLASSES)[:5]
            sizes = [n if k in few else 12 for k in range(CLASSES)]
            x, y = labeled([own[k][order[k, : sizes[k]]] for k in range(CLASSES)])
            message = world.message(received, x, y, trial, least, epsilon)
            # the server knows the model that made the features: the one it got, or the one it sent
            model = (message if epsilon is None else received)["model"]
            for k in few:
                there = bool(message["prototypes"]["count"][k] > 0)
                sent += there
                m = world.features(model, world.server_has[DOMAIN][k]).mean(0)
                p = message["prototypes"]["mean"][k] - m
                f = world.features(model, own[k][order[k]]) - m
                score = F.cosine_similarity(f, p[None]) if there else torch.zeros(OWN)
                scores.append(score.numpy())
                members.append(np.arange(OWN) < n)
        auc = roc_auc_score(np.concatenate(members), np.concatenate(scores))
        show("membership", label, f"sent {sent:2} of {5 * trials} classes, AUC {auc:.3f}")


# ---- property ------------------------------------------------------------------------------------


def prototypes_of(
    world: World, received: Tree, have: dict[str, Tensor], count: int, first: int,
    epsilon: float | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The prototypes of so many clients as rows, and which of them have the property."""
    rows, labels = [], []
    for i in range(count):
        rng, has = np.random.default_rng(first + i), i % 2 == 0
        own = [have[DOMAIN][k][rng.permutation(len(have[DOMAIN][k]))[:10]]
               for k in range(CLASSES)]  # fmt: skip
        if has:
            for k in range(CLASSES):
                others = have[SECOND][k]
                own[k] = torch.cat([own[k][3:], others[rng.permutation(len(others))[:3]]])
        message = world.message(received, *labeled(own), first + i, 1, epsilon)
        rows.append(message["prototypes"]["mean"].flatten().numpy())
        labels.append(has)
    return np.stack(rows), np.array(labels)


def property_inference(world: World, received: Tree, shadows: int, clients: int) -> None:
    for epsilon in (None, *EPSILONS):
        shadow, has = prototypes_of(world, received, world.server_has, shadows, 1000, epsilon)
        rows, labels = prototypes_of(world, received, world.clients_have, clients, 5000, epsilon)
        scale = np.abs(shadow).max() or 1.0
        attack = LogisticRegression(C=1.0, max_iter=2000).fit(shadow / scale, has)
        right = float((attack.predict(rows / scale) == labels).mean())
        label = "10 images of each class" + (f", ε {epsilon:g}" if epsilon else "")
        show("property", label, f"right {right:.0%} of {clients} clients")


def show(attack: str, case: str, numbers: str) -> None:
    print(f"{attack:14} {case:32} {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", choices=("reconstruction", "membership", "property"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trials, steps, only = options.trials, options.steps, options.only
    print(f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores")
    with one_thread():
        if only in (None, "reconstruction"):
            reconstruction(hostile_world(), trials, steps, options.out)
        if only != "reconstruction":
            world = World({})
            received = honest(world, steps // 5)
        if only in (None, "membership"):
            membership(world, received, trials)
        if only in (None, "property"):
            property_inference(world, received, 10 * trials, 5 * trials)


if __name__ == "__main__":
    main()
