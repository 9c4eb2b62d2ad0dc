"""Downloads from a server on this machine, with small files in the formats of the real ones."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import itertools
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.filesize import decimal
from scipy.io import savemat
from typer.testing import CliRunner

import protofed
from protofed.cli.app import app
from protofed.data.download import SUMS, DiskFull, Downloader, Mismatch, count, select
from protofed.data.sources import PUBLISHED, digits
from protofed.data.sources.published import RemoteFile
from protofed.errors import ProtofedError

RNG = np.random.default_rng(0)


def idx(n: int) -> bytes:
    pixels = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    return gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, n, 28, 28) + pixels.tobytes())


def idx_labels(n: int) -> bytes:
    labels = RNG.integers(0, 10, n, dtype=np.uint8)
    return gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, n) + labels.tobytes())


def libsvm(n: int) -> bytes:
    rows = RNG.uniform(-1, 1, (n, 256))
    lines = [" ".join(f"{i + 1}:{v:.3f}" for i, v in enumerate(row)) for row in rows]
    return bz2.compress("".join(f"{1 + i % 10} {x}\n" for i, x in enumerate(lines)).encode())


def mat(n: int) -> bytes:
    file = io.BytesIO()
    images = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
    savemat(file, {"X": images, "y": np.arange(1, n + 1, dtype=np.uint8)[:, None] % 10 + 1})
    return file.getvalue()


def kfold(n: int) -> bytes:
    return "".join(f"photo/dog/056_{i:04}.jpg 1\n" for i in range(n)).encode()


@dataclass
class Served:
    """A file of the server, and how the server misbehaves with it."""

    content: bytes
    cuts: list[int] = field(default_factory=list)  # bytes sent of the first answers
    status: list[int] = field(default_factory=list)  # of the first answers, instead of the file
    headers: dict[str, str] = field(default_factory=dict)
    length: bool = True


class Site:
    """A web server on this machine."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.asked: list[str] = []
        self.encodings: set[str | None] = set()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.lstrip("/")
        self.asked.append(name)
        self.encodings.add(request.headers.get("Accept-Encoding"))
        file = self.files.get(name)
        if file is None or file.status:
            request.send_response(file.status.pop(0) if file else 404)
            for header, value in (file.headers if file else {}).items():
                request.send_header(header, value)
            request.end_headers()
            return
        request.send_response(200)
        if file.length:
            request.send_header("Content-Length", str(len(file.content)))
        for header, value in file.headers.items():
            request.send_header(header, value)
        request.end_headers()
        request.wfile.write(file.content[: file.cuts.pop(0)] if file.cuts else file.content)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    site = Site()
    yield site
    site.close()


class Client:
    """A downloader that does not wait, and what it printed."""

    def __init__(self, folder: Path, terminal: bool = False) -> None:
        self.folder, self.waits, self.text = folder, list[float](), io.StringIO()
        console = Console(file=self.text, force_terminal=terminal, width=200)
        self.downloader = Downloader(console, timeout=(5, 5), sleep=self.waits.append)

    def __call__(self, *files: RemoteFile) -> None:
        self.downloader.fetch(files, self.folder)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "digits")


def remote(site: Site, name: str, content: bytes, n: int, **more: Any) -> RemoteFile:
    site.files[name.rpartition("/")[2]] = Served(content)
    settings = {
        "urls": (site.url + name.rpartition("/")[2],),
        "md5": hashlib.md5(content).hexdigest(),
        "cited": "a loader",
        "count": n,
        **more,
    }
    return RemoteFile(name, domain="x", **settings)


def left(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_all_formats_arrive_whole_and_checked(site: Site, client: Client) -> None:
    contents = {
        "mnist/train-images-idx3-ubyte.gz": (idx(7), 7),
        "mnist/train-labels-idx1-ubyte.gz": (idx_labels(7), 7),
        "usps/usps.bz2": (libsvm(5), 5),
        "svhn/train_32x32.mat": (mat(4), 4),
        "lists/photo_train_kfold.txt": (kfold(9), 9),
    }
    client(*(remote(site, name, content, n) for name, (content, n) in contents.items()))
    assert left(client.folder) == set(contents)
    for name, (content, _) in contents.items():
        assert (client.folder / name).read_bytes() == content
    assert site.encodings == {"identity"}  # a .gz file must not be unpacked on the way
    # Not a terminal: a line for the host, then one per file, no bar.
    first, *lines = client.text.getvalue().splitlines()
    assert first == f"asking {site.url.split('/')[2]}"
    assert len(lines) == len(contents)
    assert all("MD5 as published by a loader" in line for line in lines)


def test_a_terminal_sees_a_bar(site: Site, tmp_path: Path) -> None:
    client = Client(tmp_path, terminal=True)
    client(remote(site, "usps/usps.bz2", libsvm(3), 3))
    assert "━" in client.text.getvalue()


def test_without_a_terminal_a_long_download_has_a_few_lines(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.data.download._CHUNK", 10)
    clock = itertools.count()
    monkeypatch.setattr("protofed.silence.monotonic", lambda: next(clock))
    client(remote(site, "usps/usps.bz2", content := libsvm(3), 3))
    lines = [line for line in client.text.getvalue().splitlines() if " of " in line]
    assert 1 <= len(lines) <= 3
    assert all(line.endswith(f" of {decimal(len(content))}") for line in lines)


def test_already_there_is_not_fetched_again(site: Site, client: Client) -> None:
    file = remote(site, "mnist/t10k-images-idx3-ubyte.gz", idx(3), 3)
    client(file)
    asked = len(site.asked)
    client(file)
    assert len(site.asked) == asked
    assert "already there" in client.text.getvalue()


def test_a_cut_transfer_is_repeated(site: Site, client: Client) -> None:
    content = mat(40)
    file = remote(site, "svhn/test_32x32.mat", content, 40)
    site.files["test_32x32.mat"].cuts = [1000, 2000]
    client(file)
    assert (client.folder / file.path).read_bytes() == content
    assert client.waits == [1.0, 2.0]
    assert left(client.folder) == {file.path}


def test_a_transfer_that_is_always_cut(site: Site, client: Client) -> None:
    file = remote(site, "svhn/test_32x32.mat", mat(40), 40)
    site.files["test_32x32.mat"].cuts = [1000] * 3
    with pytest.raises(ProtofedError, match=r"1000 bytes read.*\(3 attempts\)"):
        client(file)
    assert left(client.folder) == set()


def test_a_server_that_does_not_say_the_size(site: Site, client: Client) -> None:
    content = mat(30)
    file = remote(site, "svhn/test_32x32.mat", content, 30)
    served = site.files["test_32x32.mat"]
    served.length = False
    client(file)
    assert (client.folder / file.path).read_bytes() == content
    # a cut then looks like the end of the file: only the checksum shows it
    (client.folder / file.path).unlink()
    served.cuts = [700]
    with pytest.raises(ProtofedError, match="MD5"):
        client(file)


def test_a_file_with_a_wrong_checksum_is_not_put_in_place(site: Site, client: Client) -> None:
    content = idx(4)
    file = remote(site, "mnist/t10k-images-idx3-ubyte.gz", content, 4, md5="0" * 32)
    with pytest.raises(ProtofedError) as error:
        client(file)
    assert hashlib.md5(content).hexdigest() in str(error.value)
    assert "a loader publishes " + "0" * 32 in str(error.value)
    assert left(client.folder) == set()


def test_a_wrong_copy_of_one_home_is_replaced_by_anothers(site: Site, client: Client) -> None:
    content = idx(4)
    file = remote(site, "mnist/a.gz", content, 4, urls=(site.url + "page", site.url + "a.gz"))
    site.files["page"] = Served(b"<html>this page has moved</html>")
    client(file)
    assert (client.folder / file.path).read_bytes() == content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (kfold(8), "8 entries, expected 9"),
        (b"<html>no list</html>\n" * 9, "neither a file of images nor a list"),
        (idx(9)[:-20], "neither a file of images|cannot read"),
    ],
)
def test_without_a_checksum_the_count_decides(
    site: Site, client: Client, content: bytes, told: str
) -> None:
    with pytest.raises(ProtofedError, match=told):
        client(remote(site, "lists/photo_train_kfold.txt", content, 9, md5=None))
    assert left(client.folder) == set()


def test_the_first_hash_is_recorded_and_compared_later(site: Site, client: Client) -> None:
    content = kfold(12)
    file = remote(site, "lists/photo_train_kfold.txt", content, 12, md5=None)
    client(file)
    sums = client.folder / "lists" / SUMS
    first = hashlib.sha256(content).hexdigest()
    assert json.loads(sums.read_text()) == {"photo_train_kfold.txt": first}
    assert f"as recorded in {SUMS}" in client.text.getvalue()
    # The file here was changed.
    other = content.replace(b"dog", b"cat")
    (client.folder / file.path).write_bytes(other)
    second = hashlib.sha256(other).hexdigest()
    with pytest.raises(Mismatch, match=f"{second}, at the first download it was {first}"):
        client(file)
    assert (client.folder / file.path).read_bytes() == other  # the user's, left alone
    # The home serves another one.
    (client.folder / file.path).unlink()
    site.files["photo_train_kfold.txt"].content = other
    with pytest.raises(ProtofedError, match=f"{second}, at the first download it was {first}"):
        client(file)
    assert not (client.folder / file.path).exists()
    assert json.loads(sums.read_text()) == {"photo_train_kfold.txt": first}


def test_damaged_sums_are_an_error(site: Site, client: Client) -> None:
    file = remote(site, "lists/photo_train_kfold.txt", kfold(2), 2, md5=None)
    (client.folder / "lists").mkdir(parents=True)
    (client.folder / "lists" / SUMS).write_text("{")
    with pytest.raises(ProtofedError, match="cannot be read"):
        client(file)


def test_a_damaged_file_is_reported_and_kept(site: Site, client: Client) -> None:
    file = remote(site, "usps/usps.bz2", libsvm(2), 2)
    (client.folder / "usps").mkdir(parents=True)
    (client.folder / file.path).write_bytes(b"half")
    with pytest.raises(Mismatch, match="move it away and fetch it again"):
        client(file)
    assert (client.folder / file.path).read_bytes() == b"half"
    assert not site.asked


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_stops_at_once(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_full_disk(self: object, url: str, path: str, pooch: None) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", to_full_disk)
    files = [remote(site, f"usps/{i}.bz2", libsvm(2), 2) for i in range(2)]
    with pytest.raises(DiskFull, match=r"the disk is full: no room for usps/0\.bz2 \(free some"):
        client(*files)
    assert left(client.folder) == set()


def test_404_leads_to_the_mirror(site: Site, client: Client) -> None:
    content = libsvm(3)
    urls = (site.url + "gone.bz2", site.url + "usps.bz2")
    client(remote(site, "usps/usps.bz2", content, 3, urls=urls))
    assert site.asked == ["gone.bz2", "usps.bz2"]
    assert not client.waits  # a file that is not there will not come by waiting


def test_404_everywhere_names_every_url_and_the_other_files_come(
    site: Site, client: Client
) -> None:
    good = remote(site, "usps/usps.bz2", libsvm(3), 3)
    bad = RemoteFile("usps/usps.t.bz2", (site.url + "a", site.url + "b"), "usps")
    with pytest.raises(ProtofedError) as error:
        client(bad, good)
    assert str(error.value).count("HTTP 404") == 2
    assert left(client.folder) == {good.path}


def test_many_failures_are_counted(site: Site, client: Client) -> None:
    files = [RemoteFile(f"lists/{i}.txt", (site.url + str(i),), "x") for i in range(9)]
    with pytest.raises(ProtofedError, match=r"9 of 9 files(.|\n)*and 5 more"):
        client(*files)


def test_a_server_with_a_problem_is_asked_again(site: Site, client: Client) -> None:
    content = libsvm(3)
    file = remote(site, "usps/usps.bz2", content, 3)
    site.files["usps.bz2"].status = [503, 429]
    client(file)
    assert client.waits == [1.0, 2.0]
    assert (client.folder / file.path).read_bytes() == content
    (client.folder / file.path).unlink()
    site.files["usps.bz2"].status = [503] * 3
    with pytest.raises(ProtofedError, match=r"HTTP 503 Service Unavailable \(3 attempts\)"):
        client(file)


def test_a_host_that_does_not_answer_is_asked_once(client: Client) -> None:
    nobody = "http://127.0.0.1:9/"  # the discard port: nothing listens there
    files = [RemoteFile(f"lists/{i}.txt", (nobody + str(i),), "x") for i in range(3)]
    with pytest.raises(
        ProtofedError, match=r"does not answer: .*refused(.|\n)*did not answer before"
    ):
        client(*files)
    assert client.waits == []
    assert client.text.getvalue() == "asking 127.0.0.1:9\n127.0.0.1:9 does not answer\n"
    assert not client.folder.exists()  # no empty folders are left


def test_a_failed_file_leaves_the_others_alone(site: Site, client: Client) -> None:
    good = remote(site, "lists/photo_train_kfold.txt", kfold(3), 3)
    with pytest.raises(ProtofedError, match="HTTP 404"):
        client(good, RemoteFile("usps/usps.bz2", (site.url + "none",), "x"))
    assert left(client.folder) == {good.path}
    assert not (client.folder / "usps").exists()


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_only_http_is_fetched(site: Site, client: Client, url: str) -> None:
    with pytest.raises(ProtofedError, match="only http and https"):
        client(RemoteFile("lists/x.txt", (url,), "x"))
    site.files["x"] = Served(b"", status=[302] * 9, headers={"Location": url})
    with pytest.raises(ProtofedError):
        client(RemoteFile("lists/x.txt", (site.url + "x",), "x"))
    assert not (client.folder / "lists/x.txt").exists()


def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("a file where a folder should be")
    with pytest.raises(ProtofedError, match="cannot write"):
        Client(tmp_path / "digits")(remote(site, "usps/usps.bz2", libsvm(1), 1))


# ---- published files and the command ----------------------------------------------------------


def test_every_published_file_can_be_checked() -> None:
    for task in PUBLISHED.values():
        assert len({file.path for file in task.files}) == len(task.files)
        for file in task.files:
            assert file.urls
            assert file.count
            assert all(url.startswith(("http://", "https://")) for url in file.urls)
            assert (file.md5 is None) == (file.cited == "")
            assert file.md5 is None or len(bytes.fromhex(file.md5)) == 16


def test_the_files_of_one_domain() -> None:
    files, manual = select("digits", "usps")
    assert {file.domain for file in files} == {"usps"} and not manual
    assert not select("digits", "syn")[0]
    with pytest.raises(ProtofedError, match="did you mean mnist"):
        select("digits", "mnits")
    with pytest.raises(ProtofedError, match="did you mean digits"):
        select("digit")
    with pytest.raises(ProtofedError, match="needs no download"):
        select("glyphs")


Invoke = Callable[..., Any]


@pytest.fixture
def invoke(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """The command, with files from the local server."""
    small = (remote(site, "usps/usps.bz2", libsvm(3), 3),)
    for name, task in PUBLISHED.items():
        monkeypatch.setitem(PUBLISHED, name, replace(task, files=small))
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "400")
    return lambda *words: CliRunner().invoke(app, ["data", "fetch", *words])


def test_the_command_says_what_to_download_by_hand(invoke: Invoke, tmp_path: Path) -> None:
    for task, home in [
        ("digits", "https://www.kaggle.com/datasets/prasunroy/synthetic-digits"),
        ("office_caltech", "https://github.com/jindongwang/transferlearning"),
        ("pacs", "https://dali-dl.github.io/project_iccv2017.html"),
        ("vlcs", "https://drive.google.com/uc?id=1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),
    ]:
        result = invoke(task)
        assert result.exit_code == 1
        for part in ("by hand", home, str(tmp_path / "data" / task), f"data verify {task}"):
            assert part in result.output
        assert (tmp_path / "data" / task / "usps/usps.bz2").exists()


def test_what_was_downloaded_by_hand_is_found(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "data/digits/syn/imgs_train/3").mkdir(parents=True)
    (tmp_path / "data/pacs/kfold/photo/dog").mkdir(parents=True)
    for task in ("digits", "pacs"):
        result = invoke(task)
        assert result.exit_code == 0
        assert "complete" in result.output


def test_the_command_puts_files_where_told(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("digits", "--to", str(tmp_path / "here"), "--domain", "syn")
    assert result.exit_code == 1
    assert str(tmp_path / "here" / "digits") in result.output
    assert not (tmp_path / "data").exists()


def test_what_was_fetched_is_what_the_readers_find(site: Site, client: Client) -> None:
    pair = [("train-images-idx3-ubyte.gz", idx(6)), ("train-labels-idx1-ubyte.gz", idx_labels(6))]
    pair += [("t10k-images-idx3-ubyte.gz", idx(4)), ("t10k-labels-idx1-ubyte.gz", idx_labels(4))]
    client(*(remote(site, f"mnist/{name}", c, 6 if "train" in name else 4) for name, c in pair))
    client(
        remote(site, "usps/usps.bz2", libsvm(5), 5), remote(site, "usps/usps.t.bz2", libsvm(2), 2)
    )
    client(remote(site, "svhn/train_32x32.mat", mat(4), 4))
    client(remote(site, "svhn/test_32x32.mat", mat(3), 3))
    for part in ("imgs_train", "imgs_valid"):
        (client.folder / f"syn/{part}/0").mkdir(parents=True)
        (client.folder / f"syn/{part}/0/a.png").write_bytes(b"not looked at here")
    # what a killed download leaves is not read as data
    (client.folder / "svhn/.download-x").mkdir()
    (client.folder / "svhn/.download-x/train_32x32.mat").write_bytes(mat(9))
    plan = digits.plan([client.folder], "standard")
    assert {key: len(samples) for key, samples in plan.parts.items()} == {
        ("mnist", "train"): 6, ("mnist", "test"): 4, ("usps", "train"): 5, ("usps", "test"): 2,
        ("svhn", "train"): 4, ("svhn", "test"): 3, ("syn", "train"): 1, ("syn", "test"): 1,
    }  # fmt: skip


def test_count_reads_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(gzip.decompress(idx(4))[:-1]))
    with pytest.raises(Mismatch, match="header says"):
        count(path)


def test_only_the_command_can_download() -> None:
    for path in Path(next(iter(protofed.__path__))).rglob("*.py"):
        if path.name != "download.py":
            text = path.read_text("utf-8")
            assert not re.search(r"^import (pooch|requests)|^from (pooch|requests)", text, re.M)
            assert not re.search(r"^(from|import) .*data.download", text, re.M), path
