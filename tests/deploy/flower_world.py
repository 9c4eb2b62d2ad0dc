"""A federation whose sites are functions of the test's process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from protofed.config import Config, make_config, method_files
from protofed.data import Share, load_task
from protofed.deploy.client_app import handle
from protofed.deploy.coordinator import Coordinator
from protofed.deploy.members import Member, Members
from protofed.deploy.spec import FILES, make_spec, pack, unpack, with_own_files
from protofed.federation import simulation as federation

SITES = ("scan-0", "print-0", "photo-0")
CLASSES = ("cat", "dog", "eel")
TINY: dict[str, Any] = {
    "clients": {"scan": 1, "print": 1, "photo": 1},
    "samples": {"scan": 30, "print": 24, "photo": 20},
    "rounds": 3, "epochs": 1, "batch": 8, "width": 4,
    "device": "cpu", "engine": "loop", "checkpoint_every": 1,
}  # fmt: skip


def images(folder: Path, classes: tuple[str, ...], n: int = 12, split: bool = False) -> Path:
    rng = np.random.default_rng(len(classes))
    for name in classes:
        for i in range(n):
            part = (("test" if i % 4 == 0 else "train"),) if split else ()
            path = folder.joinpath(*part, name, f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            pixels[:, :, CLASSES.index(name)] //= 3
            Image.fromarray(pixels).save(path)
    return folder


def write_site(home: Path, data: Path) -> None:
    """Let the site of this folder train on the CPU on images in ``data``."""
    about = {"site": home.name, "data": str(data), "device": "cpu"}
    (home / "site.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in about.items()))


def pictures(folder: Path, n: int) -> Path:
    """Images of no class, in some tree."""
    rng = np.random.default_rng(1)
    for i in range(n):
        path = folder / f"batch{i % 2}" / f"patient{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(path)
    return folder


def in_file_order(monkeypatch: pytest.MonkeyPatch, clients: Sequence[Any]) -> None:
    """Let the simulator's clients have all images of their domains in the order of the files.

    So do sites; the simulator else draws who gets which, and in what order.
    """
    shares = [Share(c["client"], c["domain"], torch.arange(c["samples"])) for c in clients]
    monkeypatch.setattr(federation, "split", lambda *args, **more: shares)


def through_wire(message: Message) -> tuple[Message, int]:
    """The message as the other side reads it after Flower serialized it, and its bytes."""
    parts = {i: o.deflate() for i, o in get_all_nested_objects(message).items()}
    number, size = message.object_id, sum(map(len, parts.values()))
    received = inflate_object_from_contents(number, parts)
    assert isinstance(received, Message)
    received.metadata.__dict__["_message_id"] = number
    return received, size


class FakeGrid(Grid):
    """A grid whose sites are functions of this process. ``spoil`` may change a reply."""

    def __init__(self, members: Members, keys: dict[str, bytes], homes: Path, spec: str) -> None:
        self.members, self.keys, self.homes, self.spec = members, keys, homes, spec
        self.online = list(members.sites)
        self.ids = {name: 1000 + i for i, name in enumerate(members.sites)}
        self.replies: dict[str, Message] = {}
        self.seen: list[tuple[str, RecordDict]] = []
        self.passed: list[tuple[str, int, int]] = []
        """For each message the site, and the bytes that went down and up."""
        self.spoil: Callable[[str, Message], Message | None] = lambda name, reply: reply

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **more: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [self.ids[n] for n in self.online]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=self.ids[n], public_key=self.keys[n]) for n in self.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = {i: n for n, i in self.ids.items()}
        sent = []
        for message in messages:
            name = names[message.metadata.dst_node_id]
            number = message.object_id
            message.metadata.__dict__["_message_id"] = number
            there, down = through_wire(message)
            self.seen.append((name, there.content))
            context = Context(
                run_id=1,
                node_id=self.ids[name],
                node_config={"site-folder": str(self.homes / name)},
                state=RecordDict(),
                run_config={"spec": self.spec},
            )
            reply: Message | None = handle(there, context)
            assert reply is not None
            reply = self.spoil(name, reply)
            sent.append(number)
            up = 0
            if reply is not None:
                self.replies[number], up = through_wire(reply)
            self.passed.append((name, down, up))
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]


@contextmanager
def in_a_flower_run() -> Iterator[None]:
    """Flower makes messages only inside a run."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    try:
        yield
    finally:
        TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = None


@pytest.fixture(autouse=True)
def task_identity() -> Iterator[None]:
    with in_a_flower_run():
        yield


def make_members(sites: Sequence[str] = SITES, **more: Any) -> tuple[Members, dict[str, bytes]]:
    members, keys = {}, {}
    for name in sites:
        key = ec.generate_private_key(ec.SECP384R1()).public_key()
        ssh = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        keys[name] = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        members[name] = Member(name, name.rpartition("-")[0], ssh.decode())
    values: dict[str, Any] = {
        "name": "tiny", "address": "127.0.0.1:1", "sites": members, "minimum": 2, "task": "glyphs",
        "gather_seconds": 1.0, "wait_seconds": 2.0, "round_seconds": 60.0,
    }  # fmt: skip
    return Members(**(values | more)), keys


def write_homes(members: Members, folder: Path) -> None:
    lines = [f'name = "{members.name}"', f'address = "{members.address}"', 'task = "glyphs"']
    lines += [f"minimum = {members.minimum}"]
    for m in members.sites.values():
        lines += [f'[sites."{m.name}"]', f'domain = "{m.domain}"', f'key = "{m.key}"']
    for name in members.sites:
        home = folder / name
        home.mkdir(parents=True)
        (home / "federation.toml").write_text("\n".join(lines) + "\n")
        (home / "site.toml").write_text(f'site = "{name}"\ndevice = "cpu"\n')


class World:
    """A federation of functions: grid, homes, and the means to run it."""

    def __init__(self, folder: Path, method: str, options: Any = None, **settings: Any) -> None:
        self.folder = folder
        own = ("minimum", "round_seconds", "wait_seconds")
        rules = {k: settings.pop(k) for k in own if k in settings}
        self.members, keys = make_members(**rules)
        write_homes(self.members, folder / "homes")
        self.config: Config = make_config(
            "glyphs", method, options, **{**TINY, "seed": 3, **settings}
        )
        self.run = make_spec(self.config, load_task("glyphs"))
        self.spec = pack(self.run)
        self.grid = FakeGrid(self.members, keys, folder / "homes", self.spec)
        self.out = folder / "run"
        for path in method_files(self.config.method).values():  # every machine has a copy
            for home in (folder / "server", *(folder / "homes").iterdir()):
                copy = home / FILES / f"copy-of-{Path(path).name}"
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)

    def coordinator(self) -> Coordinator:
        run = with_own_files(unpack(self.spec), self.folder / "server" / FILES, "the server")
        return Coordinator(self.grid, self.members, run, self.out, poll=0.005)


@pytest.fixture
def grid() -> Callable[..., Coordinator]:
    """A coordinator of sites that are functions, with the keys that the members have."""

    def make(members: Members, homes: Path, spec: str, out: Path) -> Coordinator:
        keys = {
            name: serialization.load_ssh_public_key(m.key.encode()).public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            for name, m in members.sites.items()
        }
        fake = FakeGrid(members, keys, homes, spec)
        run = unpack(spec, members.methods)
        return Coordinator(fake, members, run, out, poll=0.005)

    return make


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of decoded images for a module's tests, apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def world(tmp_path: Path, single_thread: None) -> Callable[..., World]:
    count = iter(range(100))

    def make(method: str = "fpl", options: Any = None, **more: Any) -> World:
        folder = tmp_path / f"world{next(count)}"
        return World(folder, method, options, **{"model": "cnn2", "width": 2, **more})

    return make
