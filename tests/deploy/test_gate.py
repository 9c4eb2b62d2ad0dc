"""What passes the gate, and what does not: Flower's own server is behind it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.testclient import TestClient

from protofed.deploy import gate
from protofed.deploy.gate import Gate, OwnUserOnly, connection_owner

START_RUN = "/v1/control/start-run"


class Site:
    """A site with a key of its own, and its connection to the server."""

    def __init__(self, link: Any, app: Any) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
        public = self.key.public_key()
        self.public = public_key_to_bytes(public)
        self.node = link.state.linkstate_factory.state().create_node("id", "name", self.public, 0)
        sign = NodeAuthHttpInterceptor(self.key, public)
        self.api = FleetHttpClient("http://testserver", interceptors=[sign])
        self.api._client = TestClient(app)

    def push(self, source: int, reply_to: str) -> int:
        """The status of a message in the name of the node ``source``."""
        about = Metadata(run_id=1, message_id="m", src_node_id=source, dst_node_id=1,
                         reply_to_message_id=reply_to, message_type="train")  # fmt: skip
        request = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[Message(metadata=about)],
            message_object_trees=[ObjectTree()],
        )
        try:
            self.api.PushMessages(request)
        except httpx.HTTPStatusError as error:
            return error.response.status_code
        return 200


@pytest.fixture(scope="module")
def link() -> Any:
    """The SuperLink that Flower's own program would serve, with authenticated sites."""
    app = create_app()
    app.state.enable_supernode_auth = True
    return app


@pytest.fixture
def public(link: Any) -> Iterator[TestClient]:
    yield TestClient(Gate(link))


def test_nothing_but_the_calls_of_sites_passes(link: Any, public: TestClient) -> None:
    """Each path of Flower's server: ten pass, and the one that starts runs is none of them."""
    passed = set()
    for method, path in PROTOBUF_REQUEST_TYPES:
        if public.request(method, path, content=b"").status_code != 404:
            passed.add(path.encode())
    assert passed == gate.PATHS and len(passed) == 10
    for path in ("/", "/docs", "/openapi.json", "/health", "/v1/responses"):
        assert public.get(path).status_code == 404
    inside = TestClient(link)  # without the gate, the same request reaches Flower
    assert inside.post(START_RUN, content=b"").status_code != 404


def head(**more: Any) -> dict[str, Any]:
    path = more.pop("raw_path", b"/v1/fleet/get-run")
    return {
        "type": "http", "method": "POST", "path": path.decode("latin1"), "raw_path": path,
        "query_string": b"", "headers": [(b"content-length", b"0")], "client": ("10.0.0.1", 1),
    } | more  # fmt: skip


def served(scope: dict[str, Any], wrapper: Any = Gate) -> tuple[int, list[dict[str, Any]]]:
    """The status of a request, and what the application behind the gate was asked."""
    asked: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(wrapper(app)(scope, receive, send))
    return (sent[0]["status"] if sent else 0), asked


@pytest.mark.parametrize(
    "more",
    [
        {"raw_path": b"/v1/control/start-run"},
        {"raw_path": b"/v1/fleet/../control/start-run"},
        {"raw_path": b"/v1/fleet/get-run/../../control/start-run"},
        {"raw_path": b"/v1/fleet/%2e%2e/control/start-run"},
        {"raw_path": b"/v1/fleet/get-run%00"},
        {"raw_path": b"/v1/fleet/get-run/"},
        {"raw_path": b"//v1/fleet/get-run"},
        {"raw_path": b"/v1/fleet//get-run"},
        {"raw_path": b"/V1/FLEET/GET-RUN"},
        {"raw_path": b"/v1/fleet/get-run;x"},
        {"raw_path": b"/v1/fleet/get%2Drun", "path": "/v1/fleet/get-run"},
        {"path": "/v1/control/start-run"},
        {"raw_path": b"/v1/fleet/register-node"},
        {"raw_path": b"/v1/fleet/unregister-node"},
        {"query_string": b"a=1"},
        {"method": "GET"},
        {"method": "OPTIONS"},
        {"type": "websocket"},
        {"headers": []},
        {"headers": [(b"transfer-encoding", b"chunked")]},
        {"headers": [(b"content-length", b"0"), (b"transfer-encoding", b"chunked")]},
        {"headers": [(b"content-length", b"0"), (b"content-length", b"9")]},
        {"headers": [(b"content-length", b"-1")]},
        {"headers": [(b"content-length", str(gate.MAX_BODY + 1).encode())]},
        {"headers": [(b"content-length", b"9" * 5000)]},
        {"headers": [(b"content-length", b"0" * 20 + b"1000000000")]},
    ],
)
def test_a_disguised_request_does_not_pass(more: dict[str, Any]) -> None:
    status, asked = served(head(**more))
    assert status in (404, 0) and not asked


def test_the_host_header_does_not_choose_what_is_authenticated() -> None:
    """Flower looks at the path that a URL made from this header has."""
    evil = [(b"host", b"x/v1/control/list-runs?"), (b"content-length", b"0"), (b"flwr", b"1")]
    status, asked = served(head(headers=evil))
    assert status == 200
    assert sorted(asked[0]["headers"]) == [  # one of each: of two, Flower takes the first
        (b"content-length", b"0"), (b"flwr", b"1"), (b"host", b"127.0.0.1"),
    ]  # fmt: skip


def test_a_site_can_only_reply_and_only_in_its_own_name(link: Any) -> None:
    site, other = Site(link, Gate(link)), Site(link, Gate(link))
    found = site.api.ActivateNode(
        ActivateNodeRequest(public_key=site.public, heartbeat_interval=30)
    )
    assert found.node_id == site.node
    assert site.push(site.node, "to") != 404  # a reply, though to no message that there was
    assert site.push(other.node, "to") == 404
    assert site.push(1, "") == 404  # "from the server"
    assert site.push(site.node, "") == 404
    open_door = Site(link, link)  # without the gate Flower takes them all
    assert open_door.push(1, "") != 404
    with pytest.raises(httpx.HTTPStatusError, match="401"):  # a good key and another's number
        site.node = other.node
        site.api.PushMessages(PushMessagesRequest(node=Node(node_id=other.node)))


def test_on_this_machine_only_the_same_user_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with socket.create_connection((host, port)) as own:
            assert connection_owner(*own.getsockname()) == os.getuid()
            mine = head(client=own.getsockname(), raw_path=START_RUN.encode())
            assert served(mine, OwnUserOnly)[0] == 200
        assert connection_owner("127.0.0.1", 1) is None
        assert served(head(client=("127.0.0.1", 1)), OwnUserOnly) == (404, [])
        if os.getuid() == 0:  # only root can be somebody else
            server.accept()
            child = os.fork()
            if not child:
                os.setuid(65534)
                with socket.create_connection((host, port)) as other:
                    other.recv(1)
                os._exit(0)
            connection, peer = server.accept()
            with connection:
                assert connection_owner(*peer) == 65534
                assert served(head(client=peer), OwnUserOnly) == (404, [])
            os.waitpid(child, 0)
