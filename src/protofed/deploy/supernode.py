"""Flower's SuperNode, which can also show the site's TLS certificate to the server.

``python -m protofed.deploy.supernode [--client-certfile FILE --client-keyfile FILE]``, and the
options of ``flower-supernode``. If another version of Flower connects differently, the certificate
is not shown and the server refuses the connection.
"""

from __future__ import annotations

import argparse
import ssl
import sys
from typing import Any

from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode

connection: Any = fleet_http_connection


def with_certificate(certificate: str, key: str) -> type:
    """The class of connections to the server that show this certificate."""

    class CertifiedClient(connection.FleetHttpClient):  # type: ignore[misc]
        def __init__(self, *args: Any, verify: ssl.SSLContext, **more: Any) -> None:
            verify.load_cert_chain(certificate, key)
            super().__init__(*args, verify=verify, **more)

    return CertifiedClient


def main() -> None:
    """Run the SuperNode until a signal."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--client-certfile")
    parser.add_argument("--client-keyfile")
    own, sys.argv[1:] = parser.parse_known_args()
    if own.client_certfile:
        connection.FleetHttpClient = with_certificate(own.client_certfile, own.client_keyfile)
    flower_supernode()


if __name__ == "__main__":
    main()
