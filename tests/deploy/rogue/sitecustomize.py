"""A site that misbehaves. Python runs this file at startup if its folder is on PYTHONPATH.

The repository's root must be there, too. ``ROGUE`` is a JSON table: what the site does in which
round (from 0). Besides the kinds of ``spoiled``, a reply may be ``late`` (by ``ROGUE_LATE``
seconds), and the process may ``die``.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from typing import Any

NAME = "protofed.deploy.site"


def spoil(module: Any) -> None:
    """Replace the site's answer with a rogue's."""
    from protofed.deploy.messages import Request, read

    honest, plan = module.answer, json.loads(os.environ["ROGUE"])

    def answer(site: Any, spec: str, content: Any) -> Any:
        request = read(content, Request)
        kind = plan.get(str(request.round)) if request.train else None
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        reply = honest(site, spec, content)
        if kind == "late":
            time.sleep(float(os.environ["ROGUE_LATE"]))
        elif kind is not None:
            from tests.deploy.spoiled import SPOILED

            SPOILED[kind][0](reply)
        return reply

    module.answer = answer


class Hook(importlib.abc.MetaPathFinder):
    """Changes the site's module when it is imported; importing it here would slow every start."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            spoil(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("ROGUE"):
    sys.meta_path.insert(0, Hook())
