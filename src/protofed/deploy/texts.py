"""The files that ``protofed deploy init`` writes, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from protofed.deploy.members import Members


def federation(
    name: str,
    address: str,
    sites: Mapping[str, tuple[str, str]],
    classes: Sequence[str],
    image_size: int,
    task: str | None,
    minimum: int,
    times: Mapping[str, float],
) -> str:
    """``federation.toml``; ``sites`` gives of each its domain and its public key."""
    wait = {"gather_seconds": 120.0, "wait_seconds": 3600.0, "round_seconds": 3600.0, **times}
    lines = [
        "# What server and sites agree on. The same file for all of them; nothing in it is secret.",
        f"name = {json.dumps(name)}",
        f"address = {json.dumps(address)}  # where sites find the server",
    ]
    if task is not None:
        lines.append(f"task = {json.dumps(task)}  # sites are clients of this task: for trying out")
    else:
        shown = json.dumps(list(classes), ensure_ascii=False)
        lines.append(f"classes = {shown}  # the folders' names; their order is the model's")
        lines.append(f"image_size = {image_size}")
    lines += [
        f"minimum = {minimum}  # sites that have to reply before anything is averaged",
        f"gather_seconds = {wait['gather_seconds']:g}  # the first round waits so long for all",
        f"wait_seconds = {wait['wait_seconds']:g}  # a round waits so long for the minimum",
        f"round_seconds = {wait['round_seconds']:g}  # a round waits so long for replies",
    ]
    for site, (domain, key) in sites.items():
        lines += ["", f"[sites.{json.dumps(site)}]"]
        lines += [f"domain = {json.dumps(domain, ensure_ascii=False)}", f"key = {json.dumps(key)}"]
    return "\n".join(lines) + "\n"


def site(name: str, task: str | None) -> str:
    """``site.toml``: what only this site decides."""
    data = "" if task else '# data = "/path/to/images"  # a tree class/image; --data wins over it\n'
    public = '# public = "/path/to/public"  # images that all sites have; --public wins over it\n'
    return (
        f"# Settings of this site; they stay here.\nsite = {json.dumps(name)}\n{data}{public}"
        'device = "auto"  # auto, cpu or cuda\nskip_bad = false  # leave out files that are no '
        "images\n"
    )


def app(spec: str, resume: bool, overwrite: bool) -> str:
    """The whole of a Flower app: it names modules of the installed package, and has no code."""
    return (
        '[project]\nname = "protofed-run"\nversion = "1.0.0"\ndescription = "A run of protofed"\n'
        'license = "MIT"\ndependencies = []\n\n'
        '[tool.flwr.app]\npublisher = "protofed"\n\n'
        '[tool.flwr.app.components]\nserverapp = "protofed.deploy.server_app:app"\n'
        'clientapp = "protofed.deploy.client_app:app"\n\n'
        f"[tool.flwr.app.config]\nspec = {json.dumps(spec)}\n"
        f"resume = {json.dumps(resume)}\noverwrite = {json.dumps(overwrite)}\n"
    )


def server_unit() -> str:
    """A systemd unit for the server."""
    return _unit(
        "protofed server",
        "/opt/protofed/bin/protofed deploy server --dir /srv/protofed/server",
        "/srv/protofed/server",
    )


def site_unit(name: str, task: str | None) -> str:
    """A systemd unit for a site."""
    home, data = "/srv/protofed/site", "" if task else " --data /srv/images"
    return _unit(
        f"protofed site {name}",
        f"/opt/protofed/bin/protofed deploy site --dir {home} --site {name}{data}",
        home,
    )


def _unit(title: str, command: str, home: str) -> str:
    return f"""# An example: adapt the user and the paths (/opt/protofed is a virtual environment).
# Then: systemctl enable --now; journalctl -u shows what it says.
[Unit]
Description={title}
After=network-online.target
Wants=network-online.target

[Service]
User=protofed
EnvironmentFile={home}/protofed.env
Environment=XDG_CACHE_HOME={home}/cache
ExecStart={command}
Restart=always
RestartSec=10
KillMode=control-group
TimeoutStopSec=40
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={home}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""


def readme(members: Members) -> str:
    """The page that says which command runs where."""
    names = list(members.sites)
    data = "" if members.task else " --data /path/to/images"
    todo = ""
    if members.task is None and not members.classes:
        todo = (
            "\n**Before anything else**: `federation.toml` names no classes yet. Fill in "
            "`classes = [...]`, the same in every copy (server and all sites).\n"
        )
    tree = (
        "Each site's images are a tree `class/image`, or `train/class/image` and "
        "`test/class/image`; without these folders every ninth and tenth image is for testing. "
        "Images never leave the site."
        if members.task is None
        else f"The sites are clients of the task `{members.task}`: they need no images."
    )
    # the task's own are known to every site, so none need to be copied
    own = " Without `--public` they are taken of the task." if members.task else ""
    copies = "\n".join(f"| `sites/{n}/` | the machine of site **{n}** |" for n in names)
    joins = "\n".join(f"    protofed deploy site --dir sites/{n} --site {n}{data}" for n in names)
    return f"""# Federation {members.name}

{len(names)} sites ({", ".join(names)}), server at `{members.address}`.
{todo}
## Who gets what

| folder | goes to |
| --- | --- |
| `server/` | the server's machine |
{copies}
| `ca/` | nobody: keep `ca.key` offline, or delete it |

`server/server.key` and each `node.key` are secrets: copy each to its own machine only, over a
channel you trust. The certificates are for testing (one year, made on this machine). For real use,
put your own `server.crt`, `server.key` and `ca.crt` in their places, and let each site make its
own key (`ssh-keygen -t ecdsa -b 384 -f node.key`) and send only the public line for
`federation.toml`.

{tree}

Some methods need **public images** (`protofed methods NAME` says so): images without labels that
may be seen by all, in any tree of folders. Copy the same ones to every site and to the server, add
`--public /path/to/public` to the site's command and to `deploy start`. Only a digest of them
travels; a site whose images differ is named in the log, and the rounds go on without it.{own}

Every machine needs the same version of protofed, with Flower: in a checkout of it,
`pip install --constraint constraints.txt '.[flower]'`.

## Which command runs where

`--dir` is where the folder lies on that machine; as they stand, the commands are for this page's
own folder, so that all can be tried on one machine.

**1.** On the server. It stays until Ctrl-C or SIGTERM; where the address is not the machine's own
(a router or a proxy in front), add `--host 0.0.0.0`:

    protofed deploy server --dir server

**2.** On each site. It stays, too, and comes back by itself when the server was away:

{joins}

**3.** On the server, in another terminal:

    protofed deploy status --dir server          # who is connected, and the runs
    protofed deploy start  --dir server --method fpl --rounds 50 --wait
    protofed deploy stop   --dir server          # ends a run early; start --resume goes on with it

Without `--wait`, `deploy start` returns at once and `deploy status` says how far the run is. With
it, Ctrl-C ends only the watching.

`server/protofed-server.service` and `sites/*/protofed-site.service` are examples for systemd;
`protofed.env` has the switches that keep Flower from calling home (the commands above set them
anyway).

Results: `server/runs/<name>/` has the model, the rounds, a summary and checkpoints (`protofed
report server/runs/<name>` makes a page of it); `server/runs/<name>.log` names every site that was
lost, late or refused. After a crash of the server: start it again, then `deploy start` with the
same options and `--resume`.

## Before it faces a network

Flower's server does not authenticate **operators**: whoever reaches its port can submit a run or
register a key. Sites run only installed code by these commands, but a run of someone else could
name other code. Let only the sites' addresses reach the port (firewall, VPN, or a reverse proxy
that asks for client certificates), and see docs/deploy.md. Sites need no open port: they only
connect to the server's.
"""
