"""``prep keygen``: make a machine's key pair for the connection between machines."""

from __future__ import annotations

from pathlib import Path

import click

from shardprep.cli.console.options import ANY_PATH, examples, json_option
from shardprep.cli.console.output import print_fields, print_json

PRIVATE_USE = "stays on this machine, where what serves or receives batches reads it"
PUBLIC_USE = (
    "goes to the others: a data machine's into the training machine's folder of allowed keys, the training "
    "machine's to every data machine"
)


@click.command(
    short_help="Make the key pair of a machine, for prep serve.",
    epilog=examples(
        "keygen trainer",
        "keygen data1 --force",
    ),
)
@click.argument("name", type=ANY_PATH, metavar="NAME_OR_PATH")
@click.option(
    "--force", is_flag=True, help="Replace the pair of that name; the others need the new one then."
)
@json_option
def keygen(name: Path, force: bool, as_json: bool) -> None:
    """Make a key pair: NAME.key_secret, which stays on this machine, and NAME.key for the others.

    Run it once on the training machine and once on each data machine. With keys, each end of the
    connection authenticates the other, and all data between them is encrypted.
    """
    from shardprep.loaders.remote.auth.keys import make_keys  # start-up time: ZeroMQ

    pair = make_keys(name, overwrite=force)
    if as_json:
        print_json({"secret": str(pair.secret), "public": str(pair.public), "fingerprint": pair.fingerprint})
        return
    fields = {pair.secret: PRIVATE_USE, pair.public: PUBLIC_USE, "fingerprint": pair.fingerprint}
    print_fields({str(name): value for name, value in fields.items()}, indent="")
