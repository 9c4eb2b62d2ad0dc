"""Federated learning when the clients' domains differ."""

from __future__ import annotations

import base64
import io
from html import escape

from protofed import analysis, engines, methods
from protofed.config import Config, make_config
from protofed.errors import Diverged, ProtofedError
from protofed.federation.simulation import Federation, Observer
from protofed.runs import Result, load_run, run
from protofed.runs.records import SELECTION, shown
from protofed.version import __version__


class _Notebook:
    """Draws results; matplotlib is imported when one is drawn, because that is slow."""

    def plot(self, result: Result) -> bytes:
        from protofed.report.curves import curves

        buffer = io.BytesIO()
        curves([result], buffer)
        return buffer.getvalue()

    def html(self, result: Result) -> str:
        config, accuracy = result.config, shown(result.accuracy, result.config.leave_out)
        head = "".join(f"<th>{escape(d)}</th>" for d in accuracy)
        body = "".join(f"<td>{a:.2f}</td>" for a in accuracy.values())
        picture = base64.b64encode(self.plot(result)).decode()
        return (
            f"<p><b>{escape(result.summary['method'])}</b> on <b>{escape(config.task)}</b>, "
            f"seed {config.seed}, {len(result.rounds)} rounds; {SELECTION}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody></table>"
            f'<img alt="accuracy per domain over rounds" src="data:image/png;base64,{picture}">'
        )


Result.notebook = _Notebook()

__all__ = [
    "Config",
    "Diverged",
    "Federation",
    "Observer",
    "ProtofedError",
    "Result",
    "__version__",
    "analysis",
    "engines",
    "load_run",
    "make_config",
    "methods",
    "run",
]
