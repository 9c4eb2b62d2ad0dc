"""Flower's SuperLink on this machine only, with the ``gate`` in front of it on the network.

``python -m protofed.deploy.superlink --gate-host HOST --gate-port PORT --gate-certfile FILE
--gate-keyfile FILE [--gate-client-ca FILE]``, and the options of ``flower-superlink``. If a version
of Flower is put together differently, this does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import sys
from collections.abc import Generator
from typing import Any

import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli import flower_superlink
from flwr.superlink.main import create_app

from protofed.deploy.gate import Gate, OwnUserOnly


class GateServer(uvicorn.Server):
    """Leaves signals to the other server of this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture nothing."""
        yield


async def serve(superlink: uvicorn.Server, gate: uvicorn.Server) -> None:
    """Run both until one ends."""
    opened = asyncio.create_task(gate.serve())
    opened.add_done_callback(lambda _: setattr(superlink, "should_exit", True))
    await superlink.serve()
    gate.should_exit = True
    await opened


def main() -> None:
    """Run the SuperLink and its gate until a signal."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gate-port", type=int, required=True)
    for name in ("--gate-host", "--gate-certfile", "--gate-keyfile"):
        parser.add_argument(name, required=True)
    parser.add_argument("--gate-client-ca")
    own, sys.argv[1:] = parser.parse_known_args()
    module = sys.modules[flower_superlink.__module__]  # the package has a function of its name
    config = module._parse_superlink_lifespan_config()
    app: Any = create_app(config, module.SuperLinkLifespan)
    both: dict[str, Any] = {
        "log_config": get_uvicorn_log_config(console_handler.level),
        "proxy_headers": False,  # they would decide who a caller is
        "ws": "none",
    }
    superlink = uvicorn.Config(
        OwnUserOnly(app), config.host, config.port,
        ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile, **both,
    )  # fmt: skip
    gate = uvicorn.Config(
        Gate(app), own.gate_host, own.gate_port, lifespan="off", server_header=False,
        ssl_certfile=own.gate_certfile, ssl_keyfile=own.gate_keyfile,
        ssl_ca_certs=own.gate_client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if own.gate_client_ca else ssl.CERT_NONE, **both,
    )  # fmt: skip
    asyncio.run(serve(uvicorn.Server(superlink), GateServer(gate)))


if __name__ == "__main__":
    main()
