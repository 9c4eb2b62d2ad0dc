"""``protofed`` called in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any, NamedTuple

import typer

from protofed.cli.app import COMMANDS, app, load, main

TINY = (
    "--rounds", "1", "--epochs", "1", "--clients", "1", "--samples", "10", "--device", "cpu",
    "--model", "cnn2", "--width", "4",
)  # fmt: skip
"""Options of a run that takes a moment."""

MINE = '''
"""Cross-entropy with another weight."""
from dataclasses import dataclass
from typing import ClassVar
import torch.nn.functional as F
from protofed.method import Method, hyper

@dataclass(frozen=True)
class Mine(Method):
    name: ClassVar[str] = "mine"
    scale: float = hyper(3.0, "s", "factor of the loss", above=0)

    def loss(self, client, batch):
        return {"ce": self.scale * F.cross_entropy(client.forward(batch.x).logits, batch.y)}
'''
"""A method of one's own, as a file."""
DIVERGES = (
    MINE.replace("Mine", "Nanny").replace('"mine"', '"nanny"').replace("self.scale", "float('nan')")
)
"""One whose loss is not finite."""


def whole() -> Any:
    """The command line with all of its commands imported."""
    group: Any = typer.main.get_command(app)
    group.commands = {name: load(name) for name in COMMANDS}
    return group


class Done(NamedTuple):
    code: int
    out: str
    err: str


def call(*args: object) -> Done:
    """``protofed`` with these arguments: exit code, stdout and stderr."""
    argv, sys.argv = sys.argv, ["protofed", *map(str, args)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def succeed(*args: object) -> str:
    """The output of a call that must succeed."""
    done = call(*args)
    assert (done.code, done.err) == (0, ""), done.err
    return done.out
