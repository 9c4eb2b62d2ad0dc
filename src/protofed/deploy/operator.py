"""The operator's commands: plan and start a run, follow it, look at it, stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.config import merged_config, method_files, task_settings
from protofed.data import load_task
from protofed.data.info import FOLDER
from protofed.deploy.members import FEDERATION_FILE, Members, read_members
from protofed.deploy.programs import CONNECTION, NODES_FILE, flwr
from protofed.deploy.run_log import says_run_is_over
from protofed.deploy.spec import FILES, RunSpec, make_spec, pack
from protofed.deploy.templating import render
from protofed.errors import ProtofedError, unknown
from protofed.federation.facts import file_digest
from protofed.files import expand_user, read_json, write_atomic
from protofed.runs.folder import RunFolder, find_runs


def plan_run(
    members: Members,
    file: Path | None,
    method: str | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    public: Path | None = None,
) -> RunSpec:
    """Plan a run of this federation.

    ``public`` is this machine's copy of the folder of public images that all sites have. It is only
    read to compute the digest of the images, which are never sent.
    """
    if public is not None and "public" in options:
        raise ProtofedError("--public contradicts --set public=...", "give only one of them")
    if method is not None and method in members.methods:
        method = members.methods[method].verified()
    agreed = {"checkpoint_every": 1, "pixel_range": members.pixel_range}
    given = {**agreed, **settings, "device": "cpu", "engine": "loop"}
    given["clients"] = members.clients()
    config = merged_config(file, members.task or members.skeleton(), method, options, given)
    if config.validate is not None:
        raise ProtofedError(
            "validate works only in the simulator: sites report only their test accuracy",
            "choose settings there (protofed sweep --validate 0.1), then start the run without it",
        )
    if config.attack is not None:
        raise ProtofedError("attack works only in the simulator", "leave it out")
    wanted = config.method.public_images
    if public is not None:
        if wanted is None:
            raise ProtofedError(
                f"method '{config.method.name}' uses no public images", "leave out --public"
            )
        source = f"{FOLDER}{expand_user(public).resolve()}"
        config = replace(config, method=config.method.with_options(public=source))
    elif wanted is not None and wanted.source == FOLDER:
        raise ProtofedError(
            f"method '{config.method.name}' needs a folder of public images, and none is named",
            "name this machine's copy: --public PATH",
        )
    if members.task is not None:
        task = load_task(config.task, **task_settings(config))
        return make_spec(config, task, members.methods)
    task = members.skeleton(config.augment, config.flip)
    asked = {name: getattr(config, name) for name in ("dirichlet", "quantity", "leave_out")}
    asked["samples"] = None if config.samples == task.samples else config.samples
    for name, value in asked.items():
        if value is not None:
            raise ProtofedError(
                f"{name} works only in the simulator: sites train on all their images"
            )
    for name in ("image_size", "pixel_range"):
        if (asked_for := getattr(config, name)) != (agreed_on := getattr(task, name)):
            raise ProtofedError(
                f"{name} is {asked_for}, but the sites agreed on {agreed_on}",
                f"change it in every {FEDERATION_FILE}, or leave it out",
            )
    return make_spec(config, task, members.methods)


def run_folder(folder: Path, spec: RunSpec) -> Path:
    """Where the server writes this run."""
    return folder / "runs" / spec.name


def start(
    folder: Path,
    spec: RunSpec,
    resume: bool,
    overwrite: bool,
    *,
    confirm: bool = False,
    on_poison: str = "stop",
) -> int:
    """Submit a run to Flower and return its number there.

    ``confirm``: accept what sites declare. ``on_poison``: what to do about a poisoned round.
    """
    out = run_folder(folder, spec)
    if out.is_dir() and any(out.iterdir()) and not (resume or overwrite):
        raise ProtofedError(
            f"'{out}' already holds a run", "--resume continues it, --overwrite starts over"
        )
    for run in live(runs(folder)):
        raise ProtofedError(
            f"run {run['run-id']} is {run['status']}", "wait for it, or: protofed deploy stop"
        )
    if spec.config.weights is not None:
        write_atomic(_weights_file(folder, spec), Path(spec.config.weights).read_bytes())
    for digest, path in zip(_files(spec), method_files(spec.config.method).values(), strict=True):
        write_atomic(folder / FILES / digest, Path(path).read_bytes())
    app, own = folder / "apps" / "protofed", folder / "apps" / f"{spec.name}.toml"
    write_atomic(app / "pyproject.toml", render("app.toml"))
    how = {"resume": resume, "overwrite": overwrite, "confirm": confirm, "on_poison": on_poison}
    write_atomic(own, render("run.toml", spec=pack(spec), **how))
    answer = flwr(folder, "run", str(app), CONNECTION, "--run-config", str(own))
    if "run-id" not in answer:
        raise ProtofedError(f"Flower did not start the run: {answer}")
    return int(answer["run-id"])


def with_weights(folder: Path, spec: RunSpec) -> RunSpec:
    """The run as its server starts it, with the weights that ``start`` put into its folder."""
    if spec.config.weights is None:
        return spec
    file = _weights_file(folder, spec)
    if file_digest(str(file)) != spec.facts.weights_digest:
        raise ProtofedError(f"'{file}' is not the file of weights that the run names")
    return replace(spec, config=replace(spec.config, weights=str(file)))


def _files(spec: RunSpec) -> list[str]:
    """The digests of the files that the run's method reads."""
    return spec.facts.files_digest.split(",") if spec.facts.files_digest else []


def _weights_file(folder: Path, spec: RunSpec) -> Path:
    return folder / "weights" / str(spec.facts.weights_digest)


def runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that the SuperLink knows of, newest first."""
    found: list[dict[str, Any]] = flwr(folder, "ls", CONNECTION).get("runs", [])
    return found


def live(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that have not ended."""
    return [run for run in runs if not str(run["status"]).startswith("finished")]


def site_status(folder: Path) -> dict[str, str]:
    """Whether each registered site is connected, as the SuperLink sees it."""
    path = folder / NODES_FILE
    known = read_json(path) if path.is_file() else {}
    nodes = flwr(folder, "supernode", "ls", CONNECTION).get("nodes", [])
    status = {str(node["node-id"]): str(node["status"]) for node in nodes}
    words = {"registered": "never connected", "online": "connected", "offline": "lost"}
    found = {site: status.get(node_id, "unknown") for site, node_id in known.items()}
    return {site: words.get(word, word) for site, word in found.items()}


def follow(
    folder: Path, number: int, log: Path, offset: int = 0, tell: Callable[[str], None] = print
) -> str:
    """Show a run's log until the run ends, and return its final status.

    ``offset`` is the size of the log before the run was started: what earlier attempts wrote.
    """
    last_asked, ending, status = 0.0, False, ""
    while True:
        if log.is_file():
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                new = file.read()
                offset = file.tell()
            for line in new.splitlines():
                tell(line)
                ending = ending or says_run_is_over(line)
        if status.startswith("finished"):
            return status
        # asking Flower takes seconds of CPU time: ask rarely until the log says that it is over
        if time.monotonic() - last_asked > (2 if ending else 15):
            known = {int(r["run-id"]): str(r["status"]) for r in runs(folder)}
            status, last_asked = known.get(number, "finished:unknown"), time.monotonic()
        time.sleep(0.5)


def roll_back(
    folder: Path, name: str | None, rounds: int, without: Sequence[str]
) -> tuple[RunFolder, int]:
    """Undo the last rounds of a run, by default the latest run; returns it and its round now.

    When it is resumed, the sites ``without`` stay left out, and no others.
    """
    members = read_members(folder)
    for site in without:
        if site not in members.sites:
            raise unknown("site", site, members.sites)
    found = {run.path.name: run for run in find_runs(folder / "runs")}
    if name is not None and name not in found:
        raise unknown(f"run in '{folder / 'runs'}':", name, found)
    if not found:
        raise ProtofedError(f"'{folder / 'runs'}' has no run")
    path = found[name or max(found, key=lambda n: found[n].rounds_written())].path
    run = RunFolder(path, members.checkpoints)
    with run.locked():
        last = run.checkpoint()
        if last is None:
            raise ProtofedError(f"'{path}' has no checkpoint")
        until = dict.fromkeys(without, last.rounds + 1)  # the last evaluation, too
        return run, run.roll_back(last.round - rounds, excluded=until).round


def stop(folder: Path, number: int | None) -> int:
    """Stop the run with this number, or the one that is running, and return its number."""
    if number is None:
        running = live(runs(folder))
        if not running:
            raise ProtofedError("no run is running")
        number = int(running[0]["run-id"])
    flwr(folder, "stop", str(number), CONNECTION)
    return number
