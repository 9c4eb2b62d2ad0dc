"""All the network can reach of the server: the ten calls that a site with a key makes.

Flower's fleet, control and runtime interfaces share one port, and whoever reaches control can start
a run. Here the SuperLink listens on this machine only, for the user who runs it; ``Gate`` is what
stands at the federation's address. It refuses with 404, which makes Flower's clients say so and end
(they take 403 to mean that a run is over).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError

CALLS = (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
    "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip
PATHS = frozenset(f"/v1/fleet/{call}".encode() for call in CALLS)
PUSH = b"/v1/fleet/push-messages"
MAX_BODY = 8 << 20
"""Bytes of a request. Flower sends arrays in pieces of 5 MiB."""
log = logging.getLogger("flwr")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Gate:
    """Passes a site's calls on to the SuperLink."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        problem = _not_a_call(scope)
        if not problem and scope["raw_path"] == PUSH:
            body = await _read(receive)
            problem = _forged(body)
            receive = _once(body, receive)
        if problem:
            await _refuse(scope, send, problem)
            return
        # Flower takes the path that it authenticates from the Host header
        headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
        scope = {**scope, "headers": [*headers, (b"host", b"127.0.0.1")]}
        await self.app(scope, receive, send)


class OwnUserOnly:
    """Serves programs of this machine that belong to the user of this process, or to root."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI), or the server's start and end."""
        if scope["type"] != "lifespan":
            user = connection_owner(*scope["client"][:2])
            if user not in (os.getuid(), 0):
                await _refuse(scope, send, f"the caller is user {user}")
                return
        await self.app(scope, receive, send)


def connection_owner(host: str, port: int) -> int | None:
    """The user at the other end of a connection over 127.0.0.1 (on Linux)."""
    end = f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1] == end and fields[9] != "0":  # a closed connection is listed as root's
            return int(fields[7])
    return None


def _not_a_call(scope: Message) -> str:
    """What is wrong with a request, judging by its head; empty if a site makes such calls."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
        return "not a call"
    if scope["raw_path"] not in PATHS or scope["path"].encode() != scope["raw_path"]:
        return "unknown path"
    sizes = [value for name, value in scope["headers"] if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if chunked or len(sizes) != 1 or not sizes[0].isdigit():
        return "a body without a size"
    if len(sizes[0]) > len(str(MAX_BODY)) or int(sizes[0]) > MAX_BODY:  # also with zeros in front
        return "a large body"
    return ""


def _forged(body: bytes) -> str:
    """What is wrong with a pushed message: a site may only reply, and only in its own name.

    The SuperLink itself checks that the node has signed, and that the reply is to a message which
    was sent to that node.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "not a message"
    node = request.node.node_id
    for message in request.messages_list:
        about = message.metadata
        if about.src_node_id != node:
            return f"node {node} sends in the name of node {about.src_node_id}"
        if not about.reply_to_message_id:
            return f"node {node} sends a message that is not a reply"
    return ""


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _once(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body which has been read already."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


async def _refuse(scope: Message, send: Send, problem: str) -> None:
    what = f"{scope.get('method', scope['type'])} {scope.get('raw_path', b'')!r:.100}"
    client = (scope.get("client") or ("unknown",))[0]
    log.warning("protofed: refused %s from %s: %s", what, client, problem)
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
