"""Runs the server's SuperLink, a site's SuperNode, their executors, and ``flwr``.

The SuperLink listens on this machine only; what the network reaches is the ``gate`` in front of it.
Tasks of the SuperLink and the SuperNode go to protofed's own ``executor``, which has to know a
secret that is new at every start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.deploy.certificates import Authority, write_secret
from protofed.deploy.members import Member, Members, read_members
from protofed.deploy.site import SiteConfig
from protofed.deploy.templating import render
from protofed.errors import ProtofedError
from protofed.federation.cpu import die_with_parent
from protofed.files import make_folder, write_atomic, write_json

CONNECTION = "federation"
"""What Flower's command line calls the connection to the server."""
FLOWER_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""With these, Flower neither contacts its vendor's servers nor installs anything."""
NODES_FILE = Path("flower") / "nodes.json"
"""In the server's folder: each site's node ID in Flower."""
FOLDER_VARIABLE = "PROTOFED_SERVER"
"""The environment variable that tells the server's processes which folder is theirs."""
STOP_SECONDS = 15.0
"""How long a program may take to exit after a signal."""
CONNECTED_SECONDS = 30.0
"""A SuperNode that exits sooner is taken as never connected."""
RETRY_SECONDS = 5.0


def environment(flower_home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's programs: a home of its own, and the switches."""
    programs = str(Path(sys.executable).parent)  # Flower starts more of its programs
    path = os.pathsep.join([programs, os.environ.get("PATH", "")])
    make_folder(flower_home, private=True)
    return {**os.environ, **FLOWER_SWITCHES, "FLWR_HOME": str(flower_home), "PATH": path, **more}


def _program(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise ProtofedError(f"{name} is not installed", "pip install 'protofed[flower]'")
    return str(path)


def _require(folder: Path, *names: str) -> list[str]:
    """The paths of files that must be in a server's or a site's folder."""
    for name in names:
        if not (folder / name).is_file():
            who = "join" if name == "node.key" else "admit" if name == "client.crt" else "init"
            raise ProtofedError(f"there is no '{folder / name}'", f"protofed deploy {who} makes it")
    return [str(folder / name) for name in names]


def host_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ProtofedError(f"'{address}' is not host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def running(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during this block, then end it and whatever it started."""
    process = subprocess.Popen(
        command, env=dict(env), start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        yield process
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and whatever it started: first ask, then kill."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + STOP_SECONDS
        try:
            os.killpg(process.pid, sign)
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)  # an error once the whole group has ended
                time.sleep(0.1)
        except (ProcessLookupError, PermissionError):
            return


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the block, and its programs with it."""
    signals, interrupt = (signal.SIGTERM, signal.SIGINT), signal.default_int_handler
    before = {sign: signal.signal(sign, interrupt) for sign in signals}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _write_new(folder: Path, name: str, content: bytes) -> str:
    """Write a secret of this start, in place of the last start's; returns its path."""
    path = folder / "flower" / name
    path.unlink(missing_ok=True)
    write_secret(path, content)
    return str(path.resolve())


def _new_secret(folder: Path) -> str:
    """The path of a new secret: whoever knows it may take tasks until the next start."""
    return _write_new(folder, "executor.secret", secrets.token_bytes(32))


def _isolated(secret: str) -> list[str]:
    """Options of SuperLink and SuperNode: run nothing; give tasks to whoever knows the secret."""
    return ["--isolation", "process", "--superexec-auth-secret-file", secret]


def _executor(kind: str, address: str, secret: str, *ca: str) -> list[str]:
    return [sys.executable, "-m", "protofed.deploy.executor", kind, address, secret, *ca]


def _until_one_ends(**programs: subprocess.Popen[bytes]) -> tuple[str, int]:
    """The name and the exit code of the first of these programs to end."""
    while True:
        for name, program in programs.items():
            code = program.poll()
            if code is not None:
                return name, code
        time.sleep(0.2)


# ---- the server: SuperLink ----------------------------------------------------------------------


def serve(
    folder: Path,
    host: str | None = None,
    behind_proxy: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Run the SuperLink and its gate, with the sites' keys registered, until SIGTERM or Ctrl-C.

    ``behind_proxy``: a proxy on this machine listens at the federation's address and asks for
    client certificates; the gate listens on this machine only, one port higher.
    """
    members = read_members(folder)
    own, port = host_port(members.address)
    if behind_proxy:
        host, port = "127.0.0.1", port + 1
    host = host or own
    ca, certificate, key = _require(folder, "ca.crt", "server.crt", "server.key")
    check_free(host, port)
    # inside this machine with a certificate of this start: the server's may not name 127.0.0.1
    authority, inside = Authority("loopback"), ("127.0.0.1", _free_port())
    own_certificate, own_key = authority.server([])
    own_ca = _write_new(folder, "loopback-ca.crt", authority.certificate)
    write_connection(folder, join_address(*inside), own_ca)
    secret = _new_secret(folder)
    command = [
        sys.executable, "-m", "protofed.deploy.superlink",
        "--gate-host", host, "--gate-port", str(port),
        "--gate-certfile", certificate, "--gate-keyfile", key,
        *(["--gate-client-ca", ca] if members.client_certificates and not behind_proxy else []),
        "--host", inside[0], "--port", str(inside[1]),
        "--ssl-ca-certfile", own_ca,
        "--ssl-certfile", _write_new(folder, "loopback.crt", own_certificate),
        "--ssl-keyfile", _write_new(folder, "loopback.key", own_key),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *_isolated(secret),
    ]  # fmt: skip
    env = environment(folder / "flower", **{FOLDER_VARIABLE: str(folder.resolve())})
    with stoppable(), running(command, env) as link:
        _until_listening(link, *inside)
        members = read_members(folder)  # including sites that were admitted in the meantime
        _until_listening(link, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        work = _executor("server", join_address(*inside), secret, own_ca)
        with running(work, env) as executor:
            tell(f"registering the keys of {len(members.sites)} sites")
            if absent := [site.name for site in members.sites.values() if not site.key]:
                tell(f"without a key, and so shut out: {', '.join(absent)}")
            _register(folder, members)
            elsewhere = (host, port) != host_port(members.address)
            where = f", listening on {join_address(host, port)}" if elsewhere else ""
            tell(f"the server of {members.name} is ready at {members.address}{where}")
            name, code = _until_one_ends(SuperLink=link, executor=executor)
        raise ProtofedError(f"the {name} ended unexpectedly with exit code {code}")


def check_free(host: str, port: int) -> None:
    """Raise an error with advice if the address is taken; Flower would print a traceback."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                advice = "is another server running?"
            else:  # the address of a router or proxy in front, or an unknown name
                advice = "--host 0.0.0.0 listens on all addresses of this machine"
            raise ProtofedError(
                f"cannot listen on {join_address(host, port)}: {error.strerror}", advice
            ) from None


def _until_listening(link: subprocess.Popen[bytes], host: str, port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and link.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.2)
    raise ProtofedError(f"the SuperLink is not listening on {join_address(host, port)}")


def _register(folder: Path, members: Members) -> None:
    """Register the sites' keys, which the SuperLink keeps in memory only."""
    known = [site for site in members.sites.values() if site.key]
    write_json(folder / NODES_FILE, register(folder, known))


def register(folder: Path, members: Iterable[Member]) -> dict[str, str]:
    """Tell the running SuperLink the keys of sites; returns the number of each one's node.

    Over one connection: ``flwr`` would take seconds for each of them.
    """
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    ca, numbers = Path(_connection(folder)["root-certificates"]), dict[str, str]()
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    with ControlHttpClient.from_server_address(
        join_address(*operator_address(folder)), False, ca.read_bytes(), [version]
    ) as control:
        for member in members:
            key: Any = load_ssh_public_key(member.key.encode())
            request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=member.name)
            try:
                numbers[member.name] = str(control.RegisterNode(request).node_id)
            except httpx.TransportError:
                raise _no_server(folder) from None
            except httpx.HTTPStatusError as error:
                text = " ".join(error.response.text.split())[:600]
                raise ProtofedError(
                    f"the SuperLink refused the key of site '{member.name}': {text}"
                ) from None
    return numbers


def unregister(folder: Path, node: str) -> None:
    """Let the running SuperLink refuse a node from now on."""
    flwr(folder, "supernode", "unregister", node, CONNECTION)


def is_serving(folder: Path) -> bool:
    """Whether the server of this folder runs on this machine."""
    try:
        with socket.create_connection(operator_address(folder), 3):
            return True
    except OSError:
        return False


# ---- a site: SuperNode --------------------------------------------------------------------------


def join(site: SiteConfig, patience: float = 300.0, tell: Callable[[str], None] = print) -> None:
    """Run the site's SuperNode until SIGTERM or Ctrl-C; reconnect when the server comes back.

    Gives up after ``patience`` seconds without a connection.
    """
    key, ca = _require(site.folder, "node.key", "ca.crt")
    config = {
        "site-folder": str(site.folder.resolve()),
        "data": site.data or "",
        "public": site.public or "",
    }
    for value in config.values():
        if "'" in value or "\n" in value:
            raise ProtofedError(f"Flower does not accept the path {value!r}", "rename the folder")
    program = [_program("flower-supernode")]
    if site.members.client_certificates:
        shown, its_key = _require(site.folder, "client.crt", "client.key")
        program = [sys.executable, "-m", "protofed.deploy.supernode"]
        program += ["--client-certfile", shown, "--client-keyfile", its_key]
    env = environment(site.folder / "flower")
    tell(f"site {site.name} is joining {site.members.address}; Ctrl-C stops it")
    connected = time.monotonic()
    with stoppable():
        while True:
            secret, port = _new_secret(site.folder), _free_port()
            command = [
                *program,
                "--superlink", site.members.address,
                "--root-certificates", ca,
                "--auth-supernode-private-key", key,
                *_isolated(secret),
                "--host", "127.0.0.1", "--port", str(port),
                "--node-config", " ".join(f"{k}='{v}'" for k, v in config.items()),
            ]  # fmt: skip
            began = time.monotonic()
            work = _executor("site", f"127.0.0.1:{port}", secret)
            with running(command, env) as node, running(work, env) as executor:
                name, code = _until_one_ends(SuperNode=node, executor=executor)
            ended = time.monotonic()
            if ended - began > CONNECTED_SECONDS:
                connected = ended
            if ended - connected > patience:
                raise ProtofedError(
                    f"site '{site.name}' cannot join {site.members.address} ({name}: exit code "
                    f"{code}, explained above)",
                    "compare ca.crt, node.key and the address with the server's; a site that made "
                    "its own key has to be admitted there",
                )
            tell(
                f"not connected ({name}: exit code {code}); retrying in {RETRY_SECONDS:g} s. Is "
                "the server running, and has the operator admitted this site?"
            )
            time.sleep(RETRY_SECONDS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# ---- the operator: flwr -------------------------------------------------------------------------


def connection_file(folder: Path) -> Path:
    """The configuration of Flower's command line for a server's folder."""
    return folder / "operator" / "config.toml"


def operator_address(folder: Path) -> tuple[str, int]:
    """Where the operator's commands reach the SuperLink that was started last."""
    return host_port(_connection(folder)["address"])


def _connection(folder: Path) -> dict[str, str]:
    raw = tomllib.loads(connection_file(folder).read_text("utf-8"))
    found: dict[str, str] = raw["superlink"][CONNECTION]
    return found


def _no_server(folder: Path) -> ProtofedError:
    return ProtofedError(
        f"no server of {read_members(folder).name} is running on this machine",
        f"start one: protofed deploy server --dir {folder}",
    )


def write_connection(folder: Path, address: str, ca: str) -> None:
    """Write the configuration of Flower's command line: where the server is, nothing else."""
    text = render("connection.toml", connection=CONNECTION, address=address, ca=ca)
    write_atomic(connection_file(folder), text)


def flwr(folder: Path, *arguments: str, seconds: float = 120.0) -> dict[str, Any]:
    """Run Flower's command line and return the JSON object it prints."""
    if not connection_file(folder).is_file():
        raise _no_server(folder)
    try:
        done = subprocess.run(
            [_program("flwr"), *arguments, "--format", "json"],
            env=environment(folder / "operator"), timeout=seconds, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProtofedError(f"flwr {arguments[0]} did not finish within {seconds:g} s") from None
    if "SuperLink is unavailable" in done.stdout + done.stderr:
        raise _no_server(folder)
    _, brace, rest = done.stdout.partition("{")
    try:
        found: dict[str, Any] = json.loads(brace + rest)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        text = " ".join(s.strip() for s in said[-6:])[:600]
        raise ProtofedError(
            f"flwr {' '.join(arguments[:2])} failed: {text}",
            "is `protofed deploy server` running here?",
        ) from None
    if not found.get("success", True):
        text = " ".join(str(found.get("error-message", found)).split())
        raise ProtofedError(f"flwr {arguments[0]}: {text}")
    return found
