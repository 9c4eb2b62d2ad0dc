"""The command line's options; those for settings are made from the fields of ``Config``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from protofed.cli.parse import parse_jobs, parse_setting, parse_shard
from protofed.config import (
    CLIENTS,
    ENGINE,
    OUTPUT,
    PRIVACY,
    ROBUSTNESS,
    SETTINGS,
    TRAINING,
    Setting,
)

if TYPE_CHECKING:
    from protofed.studies.execution import Execution as Execution
else:
    Execution = object  # the real one imports PyTorch, which --help can do without

METHOD = "Method"
PANELS = ("", TRAINING, CLIENTS, METHOD, ROBUSTNESS, PRIVACY, ENGINE, OUTPUT)
"""The panels of a command's help, in order; options without a panel come first."""

COMMON = (
    "protocol", "seed", "rounds", "epochs", "batch", "lr", "model", "clients", "samples",
    "leave_out", "data", "image_size", "device",
)  # fmt: skip
"""The settings that ``-h`` shows; ``--help`` shows all."""

output_option = functools.partial(typer.Option, rich_help_panel=OUTPUT)
set_option = functools.partial(typer.Option, "--set", rich_help_panel=METHOD)

TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", help="The task (see `protofed tasks`), or folder:PATH; default: glyphs."
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", help="A method's name, or path/to/file.py:Class; default: fedavg."),
]
SetOption = Annotated[
    list[str] | None,
    set_option(metavar="NAME=VALUE", help="A hyper-parameter of the method; repeatable."),
]
SetOfMethodOption = Annotated[
    list[str] | None,
    set_option(
        metavar="METHOD.NAME=VALUE", help="A hyper-parameter of one of the methods; repeatable."
    ),
]
SeedsOption = Annotated[int, typer.Option("--seeds", help="Number of seeds, starting at --seed.")]
PoolOption = Annotated[
    Path,
    output_option(
        "--runs",
        metavar="DIR",
        help="The pool of runs, where existing ones are found and new ones are kept.",
    ),
]

TensorBoardOption = Annotated[
    bool,
    output_option(
        "--tensorboard",
        help="Log every round for TensorBoard as it ends: tensorboard --logdir FOLDER.",
    ),
]


def _trust(given: bool) -> None:
    if given:
        from protofed.methods import trust_code

        trust_code()


TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust,
        help="Execute the Python files that a config, study or run names as its method or model. "
        "Without it, only a file given on the command line is executed.",
    ),
]
"""Its callback does all the work before the command begins."""
ImagesOption = Annotated[
    int,
    typer.Option(min=0, help="Test images per domain for confusions and t-SNE; 0 leaves both out."),
]

_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool}


def _execution(
    *,
    pool: PoolOption = Path("runs"),
    jobs: Annotated[
        str,
        output_option(
            metavar="auto|N",
            help="How many runs at a time. auto: one per core; on GPUs, more as long as memory "
            "allows and the measured throughput grows.",
        ),
    ] = "auto",
    mps: Annotated[
        bool | None,
        output_option(
            "--mps/--no-mps",
            help="Let runs share GPUs through NVIDIA's MPS, with a daemon of their own; default: "
            "on if it works and there are several runs at a time.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        output_option(
            metavar="I/N",
            help="Run only part I of N of the planned runs, and write no tables. For batch "
            "systems: to merge pools, copy their folders into one.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        output_option(
            metavar="local|auto|HOST:PORT",
            help="Do the runs on a Ray cluster: local starts one on this machine, auto uses a "
            "running one if there is any, HOST:PORT is the address of one (docs/cluster.md).",
        ),
    ] = None,
    gpus_per_run: Annotated[
        float | None,
        output_option(
            metavar="GPUS",
            help="With --ray: how much of a GPU each run gets, e.g. 0.25; default: 1 if the "
            "cluster has GPUs, otherwise 0.",
        ),
    ] = None,
    tensorboard: TensorBoardOption = False,
) -> Execution:
    """What the options of ``with_execution`` say."""
    from protofed.studies.execution import Execution

    return Execution(
        pool, parse_jobs(jobs), mps, parse_shard(shard), ray, gpus_per_run, tensorboard
    )


def with_execution(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options on where its runs are done; it gets them as ``execution``."""
    made = inspect.signature(_execution, eval_str=True).parameters

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        command(execution=_execution(**{n: arguments.pop(n) for n in made}), **arguments)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [*(p for p in own.values() if p.name != "execution"), *made.values()]
    return _with_parameters(wrapped, parameters)


def with_settings(
    exclude: Iterable[str] = (), only: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting; ``settings`` holds the ones that were typed."""
    names = [n for n in SETTINGS if n not in set(exclude) and (not only or n in set(only))]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for p in own.values() if p.name != "settings"]
        made = [_parameter(name, SETTINGS[name]) for name in names]

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            del arguments[_BRIEF.name]
            typed = {name: arguments.pop(name) for name in names}
            settings = {n: parse_setting(n, v) for n, v in typed.items() if v is not None}
            command(**arguments, settings=settings)

        ordered = sorted((*kept, *made), key=lambda p: PANELS.index(_panel(p)))
        return _with_parameters(wrapped, [*ordered, _BRIEF])

    return decorate


def _show_common(context: typer.Context, given: bool) -> None:
    if not given:
        return
    brief, all_options = copy.copy(context.command), context.command.params
    brief.params = [p for p in all_options if p.name not in SETTINGS or p.name in COMMON]
    more = len(all_options) - len(brief.params)
    print(brief.get_help(context))
    print(f" {more} more settings: {context.command_path} --help, or docs/settings.md")
    raise typer.Exit


_BRIEF = inspect.Parameter(
    "brief",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "-h",
            is_eager=True,
            callback=_show_common,
            help="Show the common options.",
        ),
    ],
)
"""Of commands with settings, whose whole help is long; it takes ``-h`` away from ``--help``."""


def _with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in keyword}
    return command


def _panel(parameter: inspect.Parameter) -> str:
    (option,) = get_args(parameter.annotation)[1:]
    return option.rich_help_panel or ""


def _parameter(name: str, setting: Setting) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    flags = f"{flag}/--no-{flag[2:]}" if setting.kind == "bool" else flag
    known = setting.default is not None and setting.kind != "bool"
    default = f" [dim]\\[default: {setting.default}][/dim]" if known else ""
    option = typer.Option(
        flags,
        metavar="|".join(setting.choices) or setting.metavar or None,
        help=setting.help + default,
        rich_help_panel=setting.panel,
        show_default=False,
    )
    annotation: Any = Annotated[_TYPES.get(setting.kind, str) | None, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)
