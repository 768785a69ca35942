"""``prep fetch``, ``publish``, ``serve`` and ``keygen``: commands that use a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import CommandProgress, Output, fields, json_option, next_step
from shardprep.formats.errors import printable
from shardprep.formats.runtime.progress import count_of, format_size, records_of
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.transfer.fetch import FetchedDataset, fetch as fetch_dataset
from shardprep.formats.transfer.publish import PublishedDataset, publish as publish_datasets

if TYPE_CHECKING:
    from shardprep.loaders.machines.serve import SenderStats


MAX_SHARDS = 1_000_000


def _parse_shard_numbers(text: str) -> list[int]:
    """Return the numbers in a text such as 0-9,12; ranges include both ends."""
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            low, high = int(first), int(last if dash else first)
            if not 0 <= high - low < MAX_SHARDS:
                raise ValueError
            numbers.update(range(low, high + 1))
    except ValueError:
        raise ValueError(f"{text!r} is not numbers such as 0-9 or 3,5,7") from None
    return sorted(numbers)


@command(
    "Copy datasets from object storage or a server, verified.",
    "fetch s3://bucket/shards shards",
    "fetch https://host/shards/train train --shards 0-9",
)
@click.argument("url")
@click.argument("folder", type=options.ANY_PATH)
@options.value(
    "--shards",
    "NUMBERS",
    "Fetch only these shards, such as 0-9 or 3,5,7.",
    type=options.ParsedParam("shards", _parse_shard_numbers),
)
@options.transfer(fetch_dataset, without="a byte")
@options.output
def fetch(url: str, folder: Path, **chosen: Any) -> Output:
    """Copy the dataset at URL, or each split in that folder, to FOLDER. Each byte is verified.

    URL is s3://, gs://, az://, https://, http:// or file://; credentials are found in the environment.
    After any interruption, the same command continues. Intact files are kept, damaged ones are
    fetched again.
    """
    done = fetch_dataset(url, folder, **chosen)
    lines, splits = [], []
    for dataset in done:
        manifest = dataset.manifest
        state, result = _describe_copy(dataset, dataset.fetched, "fetched")
        splits.append({"path": str(dataset.path), "complete": dataset.complete} | result)
        if dataset.complete:
            lines.append(f"{dataset.path}: {_format_contents(manifest)}, all intact: {state}")
            lines += fields({"root": manifest.root})
        else:
            files = f"{len(dataset.fetched) + len(dataset.kept):,} of {count_of(len(manifest.files), 'file')}"
            lines.append(f"{dataset.path}: {files}, each intact: {state}; not a dataset yet")
    if all(dataset.complete for dataset in done):
        lines.append(next_step("inspect", folder))
    else:
        lines.append("next: run the same command without --shards to fetch the rest and complete the dataset")
    return Output({"splits": splits}, lines)


def _format_contents(manifest: Manifest) -> str:
    shards = count_of(len(manifest.shards), f"{manifest.container.upper()} shard")
    return f"{records_of(manifest.records, has_images=manifest.has_images, has_labels=True)} in {shards}"


def _describe_copy(
    dataset: FetchedDataset | PublishedDataset, names: Sequence[str], done: str
) -> tuple[str, dict[str, Any]]:
    """Return a copy's result as text and JSON; the files ``names`` were ``done``: fetched or uploaded."""
    manifest = dataset.manifest
    copied, kept = manifest.bytes_of(names), manifest.bytes_of(dataset.kept)
    there = f", {format_size(kept)} were already there" if dataset.kept else ""
    return f"{format_size(copied)} {done}{there}", {
        "url": dataset.url,
        "split": manifest.split,
        "records": manifest.records,
        done: list(names),
        f"{done}_bytes": copied,
        "kept": list(dataset.kept),
        "kept_bytes": kept,
        "root": manifest.root,
    }


@command(
    "Make a key pair, for prep serve or prep prove.",
    "keygen trainer",
    "keygen data1 --force",
    "keygen team --signing",
)
@click.argument("name", type=options.ANY_PATH, metavar="NAME_OR_PATH")
@options.flag("--force", "Replace the pair of that name; the other machines then need the new public key.")
@options.flag("--signing", "Make keys that sign the logs of runs: NAME.pem and NAME.pub.pem.")
@json_option
def keygen(name: Path, force: bool, signing: bool) -> Output:
    """Make a key pair: NAME.key_secret, which stays on this machine, and NAME.key for the others.

    Run it once on the training machine and once on each data machine. With keys, each end of the
    connection authenticates the other, and all data between them is encrypted.

    With --signing the pair signs logs: prep prove --key NAME.pem signs, --signed-by NAME.pub.pem checks.
    """
    if signing:
        from shardprep.loaders.loader.signature import make_signing_keys  # an extra

        pair = make_signing_keys(name, overwrite=force)
        uses = (
            "stays with those who sign: prep prove --key",
            "goes to everyone who checks: prep prove --signed-by",
        )
    else:
        from shardprep.loaders.machines.keys import make_keys  # start-up time: ZeroMQ

        pair = make_keys(name, overwrite=force)
        uses = (
            "stays on this machine, for the program that serves or receives batches",
            "goes to the other machines: a data machine's key into the training machine's folder of allowed "
            "keys, the training machine's key to every data machine",
        )
    files = {"secret": str(pair.secret), "public": str(pair.public)}
    shown = dict(zip(files.values(), uses, strict=True)) | {"fingerprint": pair.fingerprint}
    return Output(files | {"fingerprint": pair.fingerprint}, fields(shown, indent=""))


@command(
    "Copy datasets to object storage, verified.",
    "publish shards s3://bucket/shards",
    "publish shards/train gs://bucket/shards/train --at-once 8",
)
@click.argument("folder", type=options.FOLDER)
@click.argument("url")
@options.transfer(publish_datasets, without="an answer")
@options.output
def publish(folder: Path, url: str, **chosen: Any) -> Output:
    """Copy the dataset in FOLDER, or each split in it, to URL. Each byte is verified there.

    URL is s3://, gs://, az:// or file://; credentials are found in the environment. The manifest comes
    last. After any interruption, the same command continues; files that are already there are kept.
    """
    lines, splits = [], []
    for dataset in publish_datasets(folder, url, **chosen):
        state, result = _describe_copy(dataset, dataset.uploaded, "uploaded")
        splits.append({"already_complete": dataset.already_complete} | result)
        before = " (was complete)" if dataset.already_complete else ""
        lines.append(f"{dataset.url}: {_format_contents(dataset.manifest)}, all intact: {state}{before}")
        lines += fields({"root": dataset.manifest.root})
    lines.append(next_step("fetch", url, "COPY"))
    return Output({"splits": splits}, lines)


@command(
    "Make batches on a data machine for a training machine.",
    "serve shards/train --to tcp://trainer:5555 --key data1.key_secret --receiver trainer.key",
    "serve shards/train --to tcp://127.0.0.1:5555 --batch-size 512 --workers 8",
)
@click.argument("dataset", type=options.FOLDER)
@options.value("--to", "tcp://HOST:PORT", "Address of the receiver.", name="endpoint", required=True)
@options.combine_options(*options.LOADER)
@options.count("--seed", "Seed of the order and crops.", default=0)
@click.option("--drop-last/--keep-last", default=True, help="Leave out or keep the last, smaller batch.")
@options.file("--key", "NAME.key_secret", "This machine's secret key, from prep keygen.", name="secret")
@options.file("--receiver", "NAME.key", "The training machine's public key.")
@click.option("--name", help="Name of this machine at the receiver.  [default: host name and process]")
@options.count("--ahead", "Number of steps to lease at a time.", 1, default=12)
@click.option("--patience", type=click.FloatRange(min=0), default=600, help="Seconds to wait for a receiver.")
@options.flag(
    "--insecure-plaintext", "Use no keys on a network: any machine on it can read and change everything."
)
@options.work
def serve(
    dataset: Path,
    endpoint: str,
    transform: str,
    pixels: int,
    secret: Path | None,
    receiver: Path | None,
    name: str | None,
    ahead: int,
    patience: float,
    insecure_plaintext: bool,
    workers: int | None,
    progress: CommandProgress,
    **chosen: Any,
) -> Output:
    """Make batches of DATASET for the RemoteSource of a training machine, until the receiver closes.

    All machines that serve one receiver need the same dataset and options; workers may differ. You can stop
    it with Ctrl-C at any time: the receiver gives its unfinished batches to the others.
    """
    from shardprep.loaders import remote  # start-up time: ZeroMQ and OpenCV
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.machines.keys import SenderKeys

    if (secret is None) != (receiver is None):
        raise click.UsageError(
            "--key and --receiver go together: this machine's secret key, and the receiver's public key"
        )
    with (
        Loader(
            dataset,
            transform=options.make_transform(transform, pixels),
            workers="auto" if workers is None else workers,
            rank=0,
            world_size=1,
            **chosen,
        ) as loader,
        progress.status() as show,
    ):
        stats = remote.serve(
            loader,
            endpoint,
            keys=SenderKeys(secret, receiver) if secret and receiver else None,
            insecure=insecure_plaintext,
            name=name,
            ahead=ahead,
            patience=patience,
            report=lambda stats: show(
                f"{printable(stats.state)}: {count_of(stats.batches, 'batch')}, {_megabytes_per_second(stats)}, "
                f"{stats.lag} more requested"
            ),
        )
    sent = f"{count_of(stats.batches, 'batch')}, {stats.bytes / 1e6:,.1f} MB"
    shown = {"sent": sent, "in": f"{stats.seconds:,.1f} s, {_megabytes_per_second(stats)}"}
    result = {"dataset": str(dataset), "endpoint": endpoint, **stats.to_json()}
    return Output(result, fields(shown, indent=""))


def _megabytes_per_second(stats: SenderStats) -> str:
    return f"{stats.bytes / max(stats.seconds, 1e-9) / 1e6:,.1f} MB/s"
