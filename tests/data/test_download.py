"""Downloads from a server on this machine, with small files in the formats of the real ones."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from protofed.data.fetch import SUMS, DiskFull, Fetcher, Mismatch, count
from protofed.data.homes import RECIPES, Recipe, Source, recipe
from rich.console import Console
from scipy.io import savemat
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.data import fetch as module
from protofed.data import homes
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
    cuts: list[int] = field(default_factory=list)  # bytes sent of each answer before it is cut
    ranges: bool = True
    status: list[int] = field(default_factory=list)  # of the first answers, instead of the file
    headers: dict[str, str] = field(default_factory=dict)
    length: bool = True


class Site:
    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.asked: list[tuple[str, str | None, int]] = []  # path, Range, bytes sent
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
        name, wanted = request.path.lstrip("/"), request.headers.get("Range")
        file = self.files.get(name)
        if file is None or file.status:
            code = file.status.pop(0) if file else 404
            self.asked.append((name, wanted, 0))
            request.send_response(code)
            for header, value in (file.headers if file else {}).items():
                request.send_header(header, value)
            request.end_headers()
            return
        start, total = 0, len(file.content)
        tag = file.headers.get("ETag")
        if wanted and file.ranges and request.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= total:
                self.asked.append((name, wanted, 0))
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{total}")
                request.end_headers()
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            request.send_response(200)
        if file.length:
            request.send_header("Content-Length", str(total - start))
        for header, value in file.headers.items():
            request.send_header(header, value)
        request.end_headers()
        body = file.content[start:]
        if file.cuts:
            body = body[: file.cuts.pop(0)]
        self.asked.append((name, wanted, len(body)))
        request.wfile.write(body)

    def sent(self) -> int:
        return sum(n for _, _, n in self.asked)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    site = Site()
    yield site
    site.close()


class Client:
    """A fetcher that does not wait, and what it printed."""

    def __init__(self, folder: Path, terminal: bool = False) -> None:
        self.folder, self.waits, self.text = folder, list[float](), io.StringIO()
        console = Console(file=self.text, force_terminal=terminal, width=200)
        self.fetcher = Fetcher(console, attempts=3, timeout=5, sleep=self.waits.append)

    def __call__(self, *files: Source) -> None:
        self.fetcher.fetch(files, self.folder)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "digits")


def source(site: Site, name: str, content: bytes, n: int, **more: Any) -> Source:
    site.files[name.rpartition("/")[2]] = Served(content)
    settings = {
        "urls": (site.url + name.rpartition("/")[2],),
        "md5": hashlib.md5(content).hexdigest(),
        "cited": "a loader",
        "count": n,
        **more,
    }
    return Source(name, domain="x", **settings)


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
    client(*(source(site, name, content, n) for name, (content, n) in contents.items()))
    assert left(client.folder) == set(contents)
    for name, (content, _) in contents.items():
        assert (client.folder / name).read_bytes() == content
    # Not a terminal: one line a file, no bar.
    lines = client.text.getvalue().splitlines()
    assert len(lines) == len(contents)
    assert all("MD5 as a loader publishes it" in line for line in lines)


def test_a_terminal_sees_a_bar(site: Site, tmp_path: Path) -> None:
    client = Client(tmp_path, terminal=True)
    client(source(site, "usps/usps.bz2", libsvm(3), 3))
    assert "━" in client.text.getvalue()


def test_already_there_is_not_fetched_again(site: Site, client: Client) -> None:
    file = source(site, "mnist/t10k-images-idx3-ubyte.gz", idx(3), 3)
    client(file)
    asked = len(site.asked)
    client(file)
    assert len(site.asked) == asked
    assert "already there" in client.text.getvalue()


def test_a_cut_connection_goes_on_where_it_stopped(site: Site, client: Client) -> None:
    content = mat(40)
    file = source(site, "svhn/test_32x32.mat", content, 40)
    served = site.files["test_32x32.mat"]
    served.cuts, served.headers = [len(content) // 3, len(content) // 4], {"ETag": '"1"'}
    client(file)
    assert (client.folder / file.path).read_bytes() == content
    assert [r for _, r, _ in site.asked] == [
        None,
        f"bytes={len(content) // 3}-",
        f"bytes={len(content) // 3 + len(content) // 4}-",
    ]
    assert site.sent() == len(content)
    assert client.waits == [1.0, 1.0]  # every connection brought something: the count begins anew
    assert left(client.folder) == {file.path}


def test_another_run_goes_on_too(site: Site, client: Client, tmp_path: Path) -> None:
    content = mat(40)
    file = source(site, "svhn/test_32x32.mat", content, 40, md5=None)
    site.files["test_32x32.mat"].cuts = [1000, 0, 0, 0]
    with pytest.raises(ProtofedError, match="cut after 1000 of"):
        client(file)
    assert left(client.folder) == {
        "svhn/.test_32x32.mat.part",
        "svhn/.test_32x32.mat.part.json",
    }
    site.files["test_32x32.mat"].cuts = []
    site.asked.clear()
    Client(client.folder)(file)
    assert site.asked == [("test_32x32.mat", "bytes=1000-", len(content) - 1000)]
    assert left(client.folder) == {file.path, f"svhn/{SUMS}"}


def test_a_partial_file_of_another_version_is_not_continued(site: Site, client: Client) -> None:
    old, new = mat(20), mat(20)
    file = source(site, "svhn/test_32x32.mat", new, 20, md5=None)
    served = site.files["test_32x32.mat"]
    served.content, served.cuts, served.headers = old, [500, 0, 0, 0], {"ETag": '"old"'}
    with pytest.raises(ProtofedError):
        client(file)
    site.files["test_32x32.mat"] = Served(new, headers={"ETag": '"new"'})
    Client(client.folder)(file)
    assert (client.folder / file.path).read_bytes() == new


def test_without_a_checksum_two_homes_are_not_mixed(site: Site, client: Client) -> None:
    first, second = kfold(30), kfold(30).replace(b"056", b"057")
    urls = (site.url + "a.txt", site.url + "b.txt")
    file = Source("lists/photo_train_kfold.txt", urls, "photo", count=30)
    site.files = {"a.txt": Served(first, cuts=[100, 0, 0, 0]), "b.txt": Served(second)}
    client(file)
    assert (client.folder / file.path).read_bytes() == second


@pytest.mark.parametrize("length", [True, False])
def test_a_server_without_ranges_starts_again(site: Site, client: Client, length: bool) -> None:
    content = mat(30)
    file = source(site, "svhn/test_32x32.mat", content, 30)
    # Without a length a cut is the end of the file: only the checksum tells.
    served = site.files["test_32x32.mat"]
    served.ranges, served.length, served.cuts = False, length, [700] if length else []
    client(file)
    assert (client.folder / file.path).read_bytes() == content
    assert site.sent() == len(content) + (700 if length else 0)


def test_a_complete_partial_file_needs_nothing_more(site: Site, client: Client) -> None:
    content = libsvm(6)
    file = source(site, "usps/usps.bz2", content, 6)
    (client.folder / "usps").mkdir(parents=True)
    (client.folder / "usps/.usps.bz2.part").write_bytes(content)
    client(file)
    assert site.sent() == 0
    assert left(client.folder) == {file.path}


def test_a_partial_file_that_is_too_long_is_dropped(site: Site, client: Client) -> None:
    content = libsvm(6)
    file = source(site, "usps/usps.bz2", content, 6)
    (client.folder / "usps").mkdir(parents=True)
    (client.folder / "usps/.usps.bz2.part").write_bytes(content + b"more")
    client(file)
    assert (client.folder / file.path).read_bytes() == content


def test_a_wrong_checksum_is_told_and_the_file_not_put_in_place(site: Site, client: Client) -> None:
    content = idx(4)
    file = source(site, "mnist/t10k-images-idx3-ubyte.gz", content, 4, md5="0" * 32)
    with pytest.raises(ProtofedError) as error:
        client(file)
    assert hashlib.md5(content).hexdigest() in str(error.value)
    assert "a loader publishes " + "0" * 32 in str(error.value)
    assert left(client.folder) == {"mnist/.t10k-images-idx3-ubyte.gz.bad"}


def test_a_wrong_copy_of_one_home_is_replaced_by_anothers(site: Site, client: Client) -> None:
    content = idx(4)
    file = source(site, "mnist/a.gz", content, 4, urls=(site.url + "page", site.url + "a.gz"))
    site.files["page"] = Served(b"<html>this page has moved</html>")
    client(file)
    assert (client.folder / file.path).read_bytes() == content


def test_a_wrong_size_does_not_cost_what_was_downloaded(site: Site, client: Client) -> None:
    content = idx(9)
    urls = (site.url + "page", site.url + "a.gz")
    file = source(site, "mnist/a.gz", content, 9, urls=urls, size=len(content))
    site.files["page"] = Served(b"<html>this page has moved</html>", ranges=False)
    (client.folder / "mnist").mkdir(parents=True)
    (client.folder / "mnist/.a.gz.part").write_bytes(content[:100])
    client(file)
    # two threads answer, and either may note its answer first
    assert ("a.gz", "bytes=100-", len(content) - 100) in site.asked


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
        client(source(site, "lists/photo_train_kfold.txt", content, 9, md5=None))
    assert left(client.folder) == {"lists/.photo_train_kfold.txt.bad"}


def test_the_first_hash_is_recorded_and_compared_later(site: Site, client: Client) -> None:
    content = kfold(12)
    file = source(site, "lists/photo_train_kfold.txt", content, 12, md5=None)
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


def test_damaged_records_are_not_taken_for_none(site: Site, client: Client) -> None:
    file = source(site, "lists/photo_train_kfold.txt", kfold(2), 2, md5=None)
    (client.folder / "lists").mkdir(parents=True)
    (client.folder / "lists" / SUMS).write_text("{")
    with pytest.raises(ProtofedError, match="cannot be read"):
        client(file)


def test_a_damaged_file_that_is_there_is_told(site: Site, client: Client) -> None:
    file = source(site, "usps/usps.bz2", libsvm(2), 2)
    (client.folder / "usps").mkdir(parents=True)
    (client.folder / file.path).write_bytes(b"half")
    with pytest.raises(Mismatch, match="move it away and fetch it again"):
        client(file)
    assert (client.folder / file.path).read_bytes() == b"half"
    assert not site.asked


def test_a_full_disk_is_told_and_the_part_kept(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = RNG.bytes(300_000)
    file = source(site, "svhn/test_32x32.mat", content, 1, count=None)
    write, calls = module._write, []

    def full(to: IO[bytes], block: bytes) -> None:
        calls.append(len(block))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(to, block)

    monkeypatch.setattr(module, "_write", full)
    other = source(site, "usps/usps.bz2", libsvm(2), 2)
    with pytest.raises(DiskFull, match=r"the disk is full: \d+ of 300000 bytes are in .*goes on"):
        client(file, other)
    kept = (client.folder / "svhn/.test_32x32.mat.part").stat().st_size
    assert kept == sum(calls[:2])
    assert {name for name, _, _ in site.asked} == {"test_32x32.mat"}
    monkeypatch.setattr(module, "_write", write)
    site.asked.clear()
    client(file)
    assert site.asked == [("test_32x32.mat", f"bytes={kept}-", len(content) - kept)]
    assert (client.folder / file.path).read_bytes() == content


def test_a_disk_without_room_is_told_before_the_download(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = libsvm(3)
    usage = type("usage", (), {"free": len(content) - 1})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFull, match=f"0 of {len(content)} bytes"):
        client(source(site, "usps/usps.bz2", content, 3))


def test_404_leads_to_the_mirror(site: Site, client: Client) -> None:
    content = libsvm(3)
    urls = (site.url + "gone.bz2", site.url + "usps.bz2")
    client(source(site, "usps/usps.bz2", content, 3, urls=urls))
    assert [name for name, _, _ in site.asked] == ["gone.bz2", "usps.bz2"]
    assert not client.waits  # a file that is not there will not come by waiting


def test_404_everywhere_names_every_url_and_the_other_files_come(
    site: Site, client: Client
) -> None:
    good = source(site, "usps/usps.bz2", libsvm(3), 3)
    bad = Source("usps/usps.t.bz2", (site.url + "a", site.url + "b"), "usps")
    with pytest.raises(ProtofedError) as error:
        client(bad, good)
    assert str(error.value).count("HTTP 404") == 2
    assert left(client.folder) == {good.path}


def test_many_failures_are_counted(site: Site, client: Client) -> None:
    files = [Source(f"lists/{i}.txt", (site.url + str(i),), "x") for i in range(9)]
    with pytest.raises(ProtofedError, match=r"9 of 9 files(.|\n)*and 5 more"):
        client(*files)


def test_a_server_that_is_ill_is_asked_again(site: Site, client: Client) -> None:
    content = libsvm(3)
    file = source(site, "usps/usps.bz2", content, 3)
    site.files["usps.bz2"].status = [503, 429]
    client(file)
    assert client.waits == [1.0, 2.0]
    assert (client.folder / file.path).read_bytes() == content


def test_a_host_that_is_silent_is_asked_for_one_file_only(client: Client) -> None:
    nobody = "http://127.0.0.1:9/"  # the discard port: nothing listens there
    files = [Source(f"lists/{i}.txt", (nobody + str(i),), "x") for i in range(3)]
    with pytest.raises(ProtofedError, match=r"\(3 tries\)(.|\n)*did not answer before"):
        client(*files)
    assert len(client.waits) == 2
    assert left(client.folder) == set()


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_only_http_is_fetched(site: Site, client: Client, url: str) -> None:
    with pytest.raises(ProtofedError, match="only http and https"):
        client(Source("lists/x.txt", (url,), "x"))
    site.files["x"] = Served(b"", status=[302] * 9, headers={"Location": url})
    with pytest.raises(ProtofedError):
        client(Source("lists/x.txt", (site.url + "x",), "x"))
    assert not (client.folder / "lists/x.txt").exists()


def test_two_downloads_of_a_file_do_not_mix(site: Site, client: Client) -> None:
    file = source(site, "usps/usps.bz2", libsvm(3), 3)
    part = client.folder / "usps/.usps.bz2.part"
    part.parent.mkdir(parents=True)
    with (
        module._locked(part),
        pytest.raises(ProtofedError, match="another process is downloading"),
    ):
        client(file)
    client(file)
    assert left(client.folder) == {file.path}


def test_a_folder_that_cannot_be_written_is_told(site: Site, tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("a file where a folder should be")
    with pytest.raises(ProtofedError, match="cannot write"):
        Client(tmp_path / "digits")(source(site, "usps/usps.bz2", libsvm(1), 1))


# ---- the table and the command -----------------------------------------------------------------


def test_every_file_of_the_table_can_be_checked() -> None:
    for whole in RECIPES.values():
        assert len({s.path for s in whole.files}) == len(whole.files)
        for file in whole.files:
            assert file.urls
            assert file.count
            assert all(url.startswith(("http://", "https://")) for url in file.urls)
            assert (file.md5 is None) == (file.cited == "")
            assert file.md5 is None or len(bytes.fromhex(file.md5)) == 16


def test_recipes_of_one_domain() -> None:
    assert {s.domain for s in recipe("digits", "usps").files} == {"usps"}
    assert not recipe("digits", "usps").manual
    assert not recipe("digits", "syn").files
    with pytest.raises(ProtofedError, match="did you mean mnist"):
        recipe("digits", "mnits")
    with pytest.raises(ProtofedError, match="did you mean digits"):
        recipe("digit")
    with pytest.raises(ProtofedError, match="needs no download"):
        recipe("glyphs")


Invoke = Callable[..., Any]


@pytest.fixture
def invoke(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """The command, on a table whose automatic files come from the local server."""
    small = (source(site, "usps/usps.bz2", libsvm(3), 3),)
    table = {name: Recipe(small, whole.manual) for name, whole in RECIPES.items()}
    monkeypatch.setattr(homes, "RECIPES", table)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "400")
    return lambda *words: CliRunner().invoke(app, ["data", "fetch", *words])


def test_the_command_says_what_a_person_has_to_do(invoke: Invoke, tmp_path: Path) -> None:
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


def test_what_a_person_did_is_seen(invoke: Invoke, tmp_path: Path) -> None:
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
    from protofed.data.digits import digits_plan

    pair = [("train-images-idx3-ubyte.gz", idx(6)), ("train-labels-idx1-ubyte.gz", idx_labels(6))]
    pair += [("t10k-images-idx3-ubyte.gz", idx(4)), ("t10k-labels-idx1-ubyte.gz", idx_labels(4))]
    client(*(source(site, f"mnist/{name}", c, 6 if "train" in name else 4) for name, c in pair))
    client(
        source(site, "usps/usps.bz2", libsvm(5), 5), source(site, "usps/usps.t.bz2", libsvm(2), 2)
    )
    client(source(site, "svhn/train_32x32.mat", mat(4), 4))
    client(source(site, "svhn/test_32x32.mat", mat(3), 3))
    for part in ("imgs_train", "imgs_valid"):
        (client.folder / f"syn/{part}/0").mkdir(parents=True)
        (client.folder / f"syn/{part}/0/a.png").write_bytes(b"not looked at here")
    # What a failed download leaves must not be read as data.
    (client.folder / "svhn/.train_32x32.mat.bad").write_bytes(mat(9))
    plan = digits_plan([client.folder])
    assert {key: len(samples) for key, samples in plan.parts.items()} == {
        ("mnist", "train"): 6, ("mnist", "test"): 4, ("usps", "train"): 5, ("usps", "test"): 2,
        ("svhn", "train"): 4, ("svhn", "test"): 3, ("syn", "train"): 1, ("syn", "test"): 1,
    }  # fmt: skip


def test_count_reads_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(gzip.decompress(idx(4))[:-1]))
    with pytest.raises(Mismatch, match="header says"):
        count(path)
