"""`paceline draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from paceline.cli._interrupt import told_to_stop
from paceline.config import Config, Device, Dtype, load_config
from paceline.drafters.registry import named
from paceline.errors import ConfigError


@click.command("draft")
@click.argument("model", required=False)
@click.option(
    "--listen", default="tcp://127.0.0.1:7077", metavar="TCP", show_default=True, help="tcp://HOST:PORT."
)
@click.option("--key-file", type=click.Path(path_type=Path), metavar="FILE", help="The key of both sides.")
@click.option("--new-key", type=click.Path(path_type=Path), metavar="FILE", help="Make a key file and leave.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), help="How weights are held and multiplied.")
@click.option("--device", type=click.Choice(get_args(Device)))
@click.option("--threads", type=int, metavar="N", help="Processor cores to use; 0 = all.")
@click.option("--cores", metavar="LIST", help="Those cores, as 0-3; ranks as 0-3/4-7.")
def command(
    model: str | None, listen: str, key_file: Path | None, new_key: Path | None, **values: Any
) -> None:
    """Draft with MODEL (or "ngram") for an engine on another host.

    The engine connects with --draft-address and the same key file. Nobody without the key is answered, and
    everything on the wire is encrypted. The port is open to this host only unless --listen says otherwise.
    """
    from paceline.engine.channel import check_endpoint, read_key_file, write_key_file

    if new_key is not None:
        write_key_file(new_key)
        click.echo(
            f"{new_key} is the key: copy it to the other host, where only its owner may read it.", err=True
        )
        return
    if model is None or key_file is None:
        raise click.UsageError("Give MODEL and --key-file FILE; --new-key FILE makes a key.")
    config = _config(model, values)
    check_endpoint(listen, "--listen")
    if not listen.startswith("tcp://"):
        raise ConfigError(f"--listen is {listen!r}: write tcp://HOST:PORT.")
    keys = read_key_file(key_file)

    from paceline.engine.draft_server import DraftServer

    server = DraftServer(config, listen, keys)
    click.echo(f"drafting with {model} at {server.endpoint}; end with Ctrl-C", err=True)
    with told_to_stop() as stop:
        server.run(stop)


def _config(model: str, values: dict[str, Any]) -> Config:
    if not named(model):
        raise ConfigError('MODEL is "none": there is nothing to serve.')
    options = {
        "draft": model,
        "draft_dtype": values["dtype"],
        "device": values["device"],
        "threads": values["threads"],
        "draft_devices": values["cores"],
    }
    return load_config(options=options)
