"""Options that ``protofed run`` and ``protofed compare`` share, with their help."""

from __future__ import annotations

from typing import Annotated

import typer

TaskOption = Annotated[str | None, typer.Option("--task", help="The task (see `protofed tasks`).")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A hyper-parameter of the method; repeatable."
    ),
]
ProtocolOption = Annotated[
    str | None,
    typer.Option(help="Model, batch, epochs, rounds, optimizer; default: the task's own."),
]
RoundsOption = Annotated[int | None, typer.Option(help="Communication rounds.")]
EpochsOption = Annotated[int | None, typer.Option(help="Local epochs a round.")]
BatchOption = Annotated[int | None, typer.Option(help="Batch size.")]
LrOption = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
MomentumOption = Annotated[float | None, typer.Option(help="Momentum, reset every round.")]
DecayOption = Annotated[float | None, typer.Option("--weight-decay", help="Weight decay.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME | NAME,NAME | CLIENT=NAME,...",
        help="resnet10, resnet18, cnn3 or cnn2. Clients may have different models with features of "
        "one size: cnn3,cnn2 alternates over the clients, scan-0=cnn3,... names each one's. Only "
        "methods that send no models can take them (docs/heterogeneous.md).",
    ),
]
WidthOption = Annotated[int | None, typer.Option(help="Channels of the first layer.")]
NormOption = Annotated[str | None, typer.Option(help="batch, group or none.")]
ClientsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME | N | D=N,...",
        help="Clients of each domain: a number for all, scan=4,inverse=1, or by name: skewed (the "
        "papers' main split), equal, one, random (drawn by the seed as published code does), and "
        "on the papers' tasks printed (Digits as FPL prints it) and fedseproto.",
    ),
]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        metavar="N | D=N,...",
        help="Training images a client holds: a count, or a fraction of the domain like 0.2.",
    ),
]
LeaveOutOption = Annotated[
    str | None,
    typer.Option(
        "--leave-out",
        metavar="DOMAIN | each",
        help="A domain that no client has: it is only tested on. Each other domain is then one "
        "client, unless --clients says otherwise. compare takes each: every domain in turn, and "
        "one table of the accuracy on the unseen ones.",
    ),
]
DirichletOption = Annotated[
    float | None,
    typer.Option(
        metavar="ALPHA",
        help="Label skew on top of the domains: each client prefers classes of its own, drawn "
        "from Dirichlet(ALPHA). 0.1 leaves a client few classes, 100 hardly differs from none.",
    ),
]
QuantityOption = Annotated[
    float | None,
    typer.Option(
        metavar="BETA",
        help="Quantity skew: a domain's clients differ in size as Dirichlet(BETA) draws it, with "
        "the same number of samples in all and at least one each.",
    ),
]
LeftoverOption = Annotated[
    bool | None,
    typer.Option(
        "--leftover/--no-leftover",
        help="Where a domain has too few samples, its last client gets what is left instead of an "
        "error. On for pacs (the fourth Sketch client) and vlcs.",
    ),
]
RepairOption = Annotated[
    bool | None,
    typer.Option(
        "--repair/--no-repair",
        help="Give a client one sample of each class it misses, for one of a class it has twice. "
        "On for office_caltech (off with --dirichlet).",
    ),
]
ParticipationOption = Annotated[
    float | None, typer.Option(help="Fraction of the clients that train in a round.")
]
AverageOption = Annotated[
    str | None, typer.Option(help="Averaging weights of the model: samples or uniform.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(help="auto (bf16 on a GPU that has it, else fp32), fp32, fp64, tf32 or bf16."),
]
EngineOption = Annotated[
    str | None,
    typer.Option(help="auto, loop (one client at a time), workers (all cores), lanes (GPU)."),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Threads of the workers engine; default: one for each core.")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the real images; default: $PROTOFED_DATA, else the cache folder.",
    ),
]
SizeOption = Annotated[
    int | None, typer.Option("--image-size", help="Side of the images in pixels; default 32.")
]
FlipOption = Annotated[
    bool | None, typer.Option("--flip/--no-flip", help="Mirror half of the training images.")
]
AugmentOption = Annotated[
    str | None,
    typer.Option(help="crop (padding 4), or large: resized crop, color jitter, grayscale."),
]
TestSplitOption = Annotated[
    str | None,
    typer.Option("--test-split", help="pacs: mod10 or kfold_leaky; vlcs: 70_30 or mod10."),
]
SkipBadOption = Annotated[
    bool | None, typer.Option("--skip-bad", help="Leave out files that are no images.")
]
KeepOption = Annotated[
    str | None,
    typer.Option(
        "--keep-rounds",
        metavar="1,10,last | all | none",
        help="Rounds whose prototypes and global model are kept for analyses and the report; "
        "default: the prototypes of ten rounds and no models.",
    ),
]
ImagesOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Test images of each domain that confusions and t-SNE look at; 0 leaves both out.",
    ),
]
EveryOption = Annotated[
    int | None, typer.Option("--checkpoint-every", help="Rounds between checkpoints.")
]
FollowOption = Annotated[
    bool,
    typer.Option("--tensorboard", help="Follow the runs live: tensorboard --logdir FOLDER."),
]
