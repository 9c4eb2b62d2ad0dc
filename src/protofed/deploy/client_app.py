"""Flower's ClientApp: the site's SuperNode starts a process of it for each message.

Errors are logged here in full; the server learns only what reveals nothing of the site's files.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from protofed.deploy.wire import Refused
from protofed.errors import Diverged

app = ClientApp()
log = logging.getLogger("flwr")
SITE_FAILED = 100
"""An error code above those of Flower."""


def handle(message: Message, context: Context) -> Message:
    """Train, evaluate, or both, as the message asks."""
    try:
        # imported here, so that a failing import is reported like any other error
        from protofed.deploy.site import answer, read_site_config

        node = {key: str(value) for key, value in context.node_config.items()}
        paths = (node.get(key) or None for key in ("data", "public"))
        site = read_site_config(Path(node["site-folder"]), *paths)
        content = answer(site, str(context.run_config["spec"]), message.content)
    except (Refused, Diverged) as error:
        log.error("protofed: %s", error)
        return Message(Error(SITE_FAILED, str(error)), reply_to=message)
    except Exception as error:
        log.exception("protofed: the message could not be answered")
        reason = f"{type(error).__name__}; see the site's log"
        return Message(Error(SITE_FAILED, reason), reply_to=message)
    return Message(content, reply_to=message)


app.train()(handle)
app.evaluate()(handle)
