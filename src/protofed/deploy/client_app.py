"""Flower's ClientApp: a process of its own for each message, started by the site's SuperNode.

What goes wrong is logged here in full; the server is told only what says nothing of the site's
files.
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
"""Flower's own error codes are below."""


def reply_to(message: Message, context: Context) -> Message:
    """Train, evaluate, or both, as the message asks."""
    try:
        # here, so that an error of an import is told like any other
        from protofed.deploy.site import answer, open_home

        told = {key: str(value) for key, value in context.node_config.items()}
        paths = (told.get(key) or None for key in ("data", "public"))
        home = open_home(Path(told["site-folder"]), *paths)
        content = answer(home, str(context.run_config["spec"]), message.content)
    except (Refused, Diverged) as error:
        log.error("protofed: %s", error)
        return Message(Error(SITE_FAILED, str(error)), reply_to=message)
    except Exception as error:
        log.exception("protofed: the message could not be answered")
        reason = f"{type(error).__name__}; the log of the site says more"
        return Message(Error(SITE_FAILED, reason), reply_to=message)
    return Message(content, reply_to=message)


app.train()(reply_to)
app.evaluate()(reply_to)
