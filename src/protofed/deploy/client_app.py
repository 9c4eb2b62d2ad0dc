"""What a site does with a message; its ``executor`` forks a process for each.

Errors are logged here in full; the server learns only what reveals nothing about the site's files.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Error, Message

from protofed.deploy.audit import AuditLog
from protofed.deploy.messages import SITE_FAILED, SITE_WAITS
from protofed.deploy.policy import NotApproved
from protofed.deploy.run_log import one_line
from protofed.deploy.site import MAX_REASON, SiteConfig, answer, read_site_config
from protofed.deploy.wire import Refused
from protofed.errors import Diverged

log = logging.getLogger("flwr")


def handle(message: Message, context: Context) -> Message:
    """Train, evaluate, or both, as the message asks."""
    try:
        node = {key: str(value) for key, value in context.node_config.items()}
        paths = (node.get(key) or None for key in ("data", "public"))
        site = _read_settings(Path(node["site-folder"]), *paths)
        content = answer(site, str(context.run_config["spec"]), message.content)
    except (Refused, Diverged) as error:
        log.error("protofed: %s", one_line(str(error)))
        code = SITE_WAITS if isinstance(error, NotApproved) else SITE_FAILED
        return Message(Error(code, str(error)), reply_to=message)
    except Exception as error:
        log.exception("protofed: the message could not be answered")
        reason = f"{type(error).__name__}; see the site's log"
        return Message(Error(SITE_FAILED, reason), reply_to=message)
    return Message(content, reply_to=message)


def _read_settings(folder: Path, *paths: str | None) -> SiteConfig:
    """The site's settings; if they cannot be read, that is in the audit log, too."""
    try:
        return read_site_config(folder, *paths)
    except Exception as error:
        AuditLog(folder).append("failed", why=str(error)[:MAX_REASON])
        raise


app = handle
"""What the submitted app names. Flower looks for an assignment, and nothing imports it."""
