"""The commands `certificates`, `keys`, `server`, `register`, `site` and `check`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.keys import make_authority, make_node_key, make_server_certificate
from deploy.problem import DeployError
from deploy.site import Site, start_site

app = typer.Typer(
    help="Run the app across sites: a server, and sites with data of their own.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console(highlight=False)

KeysFolder = Annotated[Path, typer.Option("--keys", help="Folder for certificates and keys.")]
ServerState = Annotated[Path, typer.Option("--state", help="The server's folder.")]
ServerAddress = Annotated[str, typer.Option("--server", help="HOST:PORT of the server.")]
Authority = Annotated[Path, typer.Option("--ca", help="The server's ca.pem.")]
Key = Annotated[Path, typer.Option("--key", help="This site's own .key, made by `keys`.")]
Place = Annotated[int, typer.Option("--site", min=0, help="Which site this is, from 0.")]
Sites = Annotated[int, typer.Option("--sites", min=1, help="Sites there are in all.")]
Data = Annotated[str, typer.Option("--data", help="This site's text, as data.source of a run.")]
State = Annotated[Path, typer.Option("--state", help="Folder for what this site remembers.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]


@app.command()
def certificates(
    host: Annotated[
        list[str], typer.Option(help="Name or address under which sites reach it; repeatable.")
    ],
    keys: KeysFolder = Path("keys"),
    days: Annotated[float, typer.Option(min=1, help="How long the certificate is valid.")] = 365,
) -> None:
    """Make the server's certificate, and the authority (ca.pem) that sites know it by.

    The authority is made once. To renew a certificate move server.pem and server.key away first.
    """
    try:
        if not (keys / "ca.pem").exists():
            make_authority(keys)
        path = make_server_certificate(keys, host, days=days)
    except DeployError as error:
        sys.exit(str(error))
    _say(f"{path} is valid for {days:g} days, for {', '.join(host)}")
    _say(f"Every site needs a copy of {keys / 'ca.pem'}. The .key files stay here.")


@app.command()
def keys(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    folder: KeysFolder = Path("keys"),
) -> None:
    """Make a site's key, at the site: NAME.key stays there, NAME.pub goes to the operator."""
    try:
        if not name.replace("-", "").isalnum():
            raise DeployError(f"name {name!r}: allowed are letters, digits and hyphens")
        path = make_node_key(folder, name)
    except DeployError as error:
        sys.exit(str(error))
    _say(f"Send {path} to the server's operator. {path.with_suffix('.key')} stays here.")


@app.command()
def server(
    keys: KeysFolder = Path("keys"),
    state: ServerState = Path("server"),
    host: Annotated[str, typer.Option(help="Address that sites connect to.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port that sites connect to.")] = 9092,
    operator_port: Annotated[
        int, typer.Option(help="Port on this machine alone, for flwr commands.")
    ] = 9093,
) -> None:
    """Start the server: a SuperLink with TLS, node keys and a database."""
    from deploy.server import Server, flower_home, start_server

    _say(f"Sites connect to port {port}. Here, the flwr commands need")
    _say(f"  export FLWR_HOME={flower_home(state.absolute())}")
    try:
        start_server(Server(keys, state, host, port, operator_port))
    except DeployError as error:
        sys.exit(str(error))


@app.command()
def register(
    public_keys: Annotated[list[Path], typer.Argument(help="The sites' .pub files.")],
    state: ServerState = Path("server"),
) -> None:
    """Let sites in, by their public keys; the server must be running."""
    from deploy.server import register as register_site

    refused = 0
    for path in public_keys:
        try:
            register_site(path, state)
            _say(f"{path.stem} is registered")
        except DeployError as error:
            print(error, file=sys.stderr)
            refused += 1
    if refused:
        sys.exit(1)


@app.command()
def site(
    server: ServerAddress,
    key: Key,
    place: Place,
    sites: Sites,
    data: Data,
    ca: Authority = Path("keys/ca.pem"),
    state: State = Path("site"),
    device: Device = "auto",
    max_batch_size: Annotated[
        int, typer.Option(min=0, help="Sequences at once; 0: as the run says.")
    ] = 0,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of training a round; 0: no limit.")
    ] = 0,
) -> None:
    """Check this site and start it: a SuperNode with TLS and its own key."""
    from deploy.check import check_site

    own = Site(server, ca, key, place, sites, data, state, device, max_batch_size, max_seconds)
    try:
        _check_place(own)
    except DeployError as error:
        sys.exit(str(error))
    problems = [finding for finding in check_site(own) if not finding.good]
    for problem in problems:
        print(f"{problem.subject}: {problem.text}", file=sys.stderr, flush=True)
    if any(not problem.passing for problem in problems):
        sys.exit(1)
    if problems:
        _say("Trying until the server answers ...")
    start_site(own)


@app.command()
def check(
    server: ServerAddress,
    key: Key,
    data: Data,
    ca: Authority = Path("keys/ca.pem"),
    state: State = Path("site"),
    device: Device = "auto",
) -> None:
    """Say whether this site could take part, and if not, why."""
    from deploy.check import check_site

    findings = list(check_site(Site(server, ca, key, 0, 1, data, state, device)))
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark = Text("good", "green") if finding.good else Text("bad", "bold red")
        table.add_row(mark, finding.subject, finding.text)
    console.print(table)
    if not all(finding.good for finding in findings):
        sys.exit(1)


def _check_place(site: Site) -> None:
    if site.place >= site.sites:
        raise DeployError(f"--site {site.place}: allowed is 0 to {site.sites - 1}, see --sites")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)
