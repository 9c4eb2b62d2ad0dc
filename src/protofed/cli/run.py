"""``protofed run``: one method on one task; ``protofed show``: a run at a glance."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from protofed.cli.options import (
    MethodOption,
    PoolOption,
    SetOption,
    TaskOption,
    TensorBoardOption,
    TrustOption,
    output_option,
    with_settings,
)
from protofed.cli.output import console, print_results, say
from protofed.cli.parse import assignments
from protofed.errors import ProtofedError

if TYPE_CHECKING:
    from protofed.config import Config
    from protofed.runs import RunFolder


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, which batch systems send, stops the run as Ctrl-C does; a second signal is ignored.

    A study passes Ctrl-C on to its runs, which have already received it from the terminal and are
    writing a checkpoint by then.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@with_settings()
@stopped_by_sigterm()
def run(
    *,
    task: TaskOption = None,
    method: MethodOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file, e.g. another run's config.toml; other options override it."
        ),
    ] = None,
    trust_code: TrustOption = False,
    set_: SetOption = None,
    pool: PoolOption = Path("runs"),
    out: Annotated[
        Path | None,
        output_option(help="The run's folder; default: one in the pool, named after the run."),
    ] = None,
    resume: Annotated[
        bool, output_option("--resume", help="Resume from the folder's checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, output_option("--overwrite", help="Delete the run in the folder and start over.")
    ] = False,
    quiet: Annotated[bool, output_option("--quiet", help="Print only errors.")] = False,
    tensorboard: TensorBoardOption = False,
    profile: Annotated[
        bool,
        output_option(
            "--profile",
            help="Record what each thread and the GPU do in the second round, as a Chrome trace "
            "(trace.json.gz) in the run's folder.",
        ),
    ] = False,
    settings: dict[str, Any],
) -> None:
    """Run one method on one task and keep everything in a folder.

    Ctrl-C or SIGTERM writes a checkpoint; --resume continues from it and ends with
    exactly the same numbers. With more rounds, --resume extends a finished run.
    """
    from protofed.config import merged_config, task_settings
    from protofed.data import load_task
    from protofed.federation.facts import discover
    from protofed.federation.simulation import Observer
    from protofed.observers.progress import RunProgress
    from protofed.runs import RunFolder, load_run
    from protofed.runs import run as run_federation
    from protofed.runs.pool import shorter_run

    asked = merged_config(config, task, method, assignments(set_), settings)
    loaded = load_task(asked.task, **task_settings(asked))
    complete = asked.for_task(loaded.info)
    facts = discover(complete, loaded)
    folder = RunFolder(out or pool / facts.run_name(complete))
    if folder.is_finished(facts.run_hash(complete)) and not overwrite:
        if profile:
            raise ProtofedError(
                f"'{folder.path}' already holds this run, which is complete: no round to record",
                "--overwrite runs it again, --out uses another folder",
            )
        if not quiet:
            say(f"{folder.path} already holds this run, which is complete:")
            print_results([load_run(folder.path, model=False)])
        return
    if resume and not overwrite:
        shorter = None
        if out is None and not folder.has_checkpoint:
            shorter = shorter_run(pool, complete, facts)
        told = _prepare_to_resume(folder, asked, shorter)
        if told and not quiet:
            say(told)
    observers: list[Observer] = [] if quiet else [RunProgress(console)]
    if tensorboard:
        from protofed.observers.tensorboard import TensorBoard

        observers.append(TensorBoard(folder.path))
    if profile:
        from protofed.observers.profile import Profile

        observers.append(recorder := Profile(folder.path))
    result = run_federation(
        config=asked,
        task=loaded,
        out=folder.path,
        resume=resume,
        overwrite=overwrite,
        observers=observers,
    )
    if quiet:
        return
    folder.save_file("curves.png", result.plot())
    print_results([result])
    where = f"[bold]{escape(str(folder.path))}[/bold]"
    console.print(f"model, rounds, curves.png and config.toml are in {where}", soft_wrap=True)
    if profile:
        console.print(
            f"round {recorder.recorded} is recorded in [bold]{escape(str(recorder.path))}[/bold]: "
            "open it in a browser at ui.perfetto.dev or chrome://tracing",
            soft_wrap=True,
        )


def _prepare_to_resume(folder: RunFolder, config: Config, shorter: RunFolder | None) -> str:
    """What the user should know about a resumed run; ``shorter`` is a run it may extend."""
    if shorter is not None:
        rounds = len(shorter.records())
        shorter.require_extendable(config, rounds)
        folder.copy_progress(shorter)
        return f"{folder.path} extends {shorter.path}: rounds {rounds} → {config.rounds}"
    if not folder.exists:
        return f"there is no run to resume in {folder.path}: it starts from the beginning"
    if folder.starts_over(config):
        return f"no checkpoint in {folder.path} to resume from: the run starts over"
    changed = ", ".join(folder.differences(config))
    return f"{folder.path}: {changed}" if changed else ""


def show(run: Annotated[Path, typer.Argument(help="A run's folder, finished or not.")]) -> None:
    """Print a run's summary, with a sparkline of every domain's accuracy over the rounds."""
    from protofed.studies.show import lines

    for text in lines(run):
        console.print(text, highlight=False, soft_wrap=True)
