"""``prep serve``: make batches on a data machine for a training machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardprep.cli.console.options import (
    ANY_PATH,
    FOLDER,
    examples,
    json_option,
    loader_options,
    progress_option,
    transform_of,
    workers_option,
)
from shardprep.cli.console.output import print_fields, print_json
from shardprep.cli.console.progress import Form
from shardprep.cli.console.status import TEXT_ONLY, StatusLine
from shardprep.formats.printable import printable

if TYPE_CHECKING:  # start-up time: ZeroMQ and OpenCV
    from shardprep.loaders.order.epoch_order import Shuffle
    from shardprep.loaders.remote import SenderKeys, SenderStats


@click.command(
    short_help="Make batches on a data machine for a training machine.",
    epilog=examples(
        "serve shards/train --to tcp://trainer:5555 --key data1.key_secret --receiver trainer.key",
        "serve shards/train --to tcp://127.0.0.1:5555 --batch-size 512 --workers 8",
    ),
)
@click.argument("dataset", type=FOLDER)
@click.option("--to", "endpoint", required=True, metavar="tcp://HOST:PORT", help="Where the receiver is.")
@loader_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order and crops."
)
@click.option(
    "--drop-last/--keep-last",
    default=True,
    show_default=True,
    help="What becomes of a last batch that is not full.",
)
@click.option(
    "--key", "secret", type=ANY_PATH, metavar="NAME.key_secret", help="This machine's key, by prep keygen."
)
@click.option("--receiver", type=ANY_PATH, metavar="NAME.key", help="The training machine's public key.")
@click.option("--name", help="What the receiver calls this machine.  [default: host name and process]")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=600,
    show_default=True,
    help="Seconds to wait for a receiver.",
)
@click.option(
    "--insecure-plaintext",
    is_flag=True,
    help="Go without keys on a network: any machine on it can read and change everything.",
)
@workers_option
@progress_option
@json_option
def serve(
    dataset: Path,
    endpoint: str,
    transform: str,
    pixels: int,
    batch_size: int,
    shuffle: Shuffle | None,
    seed: int,
    drop_last: bool,
    secret: Path | None,
    receiver: Path | None,
    name: str | None,
    patience: float,
    insecure_plaintext: bool,
    workers: int | None,
    form: Form,
    as_json: bool,
) -> None:
    """Make batches of DATASET for the RemoteSource of a training machine, until that is closed.

    All machines that serve one receiver need the same dataset and options; workers may differ. Stop it with
    Ctrl-C at any time: the receiver asks the others for what it had not finished.
    """
    from shardprep.loaders import Loader, remote  # start-up time: ZeroMQ and OpenCV

    keys = _keys(secret, receiver)
    with (
        Loader(
            dataset,
            batch_size=batch_size,
            transform=transform_of(transform, pixels),
            shuffle=shuffle,
            seed=seed,
            workers="auto" if workers is None else workers,
            rank=0,
            world_size=1,
            drop_last=drop_last,
        ) as loader,
        StatusLine(form, TEXT_ONLY) as status,
    ):
        stats = remote.serve(
            loader,
            endpoint,
            keys=keys,
            insecure=insecure_plaintext,
            name=name,
            patience=patience,
            report=lambda stats: status.show(_state(stats)),
        )
    if as_json:
        print_json({"dataset": str(dataset), "endpoint": endpoint, **stats.to_json()})
        return
    rate = stats.bytes / max(stats.seconds, 1e-9) / 1e6
    sent = f"{stats.batches:,} batches, {stats.bytes / 1e6:,.1f} MB"
    print_fields({"sent": sent, "in": f"{stats.seconds:,.1f} s, {rate:,.1f} MB/s"}, indent="")


def _keys(secret: Path | None, receiver: Path | None) -> SenderKeys | None:
    from shardprep.loaders.remote import SenderKeys  # start-up time: ZeroMQ

    if (secret is None) != (receiver is None):
        raise click.UsageError(
            "--key and --receiver belong together: this machine's secret key, and the other's public one"
        )
    return None if secret is None or receiver is None else SenderKeys(secret, receiver)


def _state(stats: SenderStats) -> str:
    rate = stats.bytes / max(stats.seconds, 1e-9) / 1e6
    return (
        f"{printable(stats.state)}: {stats.batches:,} batches, {rate:,.1f} MB/s, {stats.lag} more asked for"
    )
