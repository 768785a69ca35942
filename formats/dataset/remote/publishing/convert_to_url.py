"""Conversion of a source to a dataset in object storage, through a scratch folder for few shards."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from shardprep.formats.containers.registry import IN_PLACE
from shardprep.formats.conversion.building.plan import PlanOptions
from shardprep.formats.conversion.building.work_folder import noting_kept
from shardprep.formats.conversion.convert import kept_of
from shardprep.formats.conversion.preparation import ConvertOptions, Request, note_untrained, prepare
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.formats.progress import Progress, shown
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.storage.writable_folder import refuse_server
from shardprep.formats.system.user_path import user_path

from .converted_to import ConvertedTo
from .publish import RETRIES, TIMEOUT_S


def convert_to_url(
    source: str | os.PathLike[str],
    url: str,
    *,
    scratch: str | os.PathLike[str] | None = None,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    retries: int = RETRIES,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> list[ConvertedTo]:
    """Convert a source to shards in object storage. After a kill at any point, the same call finishes it.

    The result has the bytes, and the root, of a local conversion. Each shard is built in ``scratch``,
    uploaded, proven to be in the store as :func:`~.publish.publish` does, and removed here: ``scratch`` has
    room for one shard more than there are workers, and for the tables. The tables and, only if there is none,
    the manifest come last. Of two different conversions to one place, one gets an error.

    ``source`` is as in :func:`~.convert.convert`. ``url`` is the place of the dataset if ``split`` is given;
    otherwise every split found is converted into ``url/<split>``. It is ``s3://``, ``gs://``, ``az://`` or
    ``file://``. ``scratch`` is a folder here that keeps the state of the work until it ends, so the
    call that goes on is given the same; None is one in the user's folder of caches, named by the URL.
    ``plan_options``, ``options``, ``source_options``, ``workers`` and ``progress`` are those of
    :func:`~.convert.convert`, ``retries`` and ``timeout_s`` those of :func:`~.publish.publish`.

    Raises what these two raise. Needs obstore.
    """
    progress, place = shown(progress), Location.parse(url)
    folder = default_scratch(place) if scratch is None else scratch
    request = replace(
        Request.of(source, folder, split, plan_options, options, source_options),
        kept_shards=1 + max(1, usable_cpus() if workers is None else workers),
    )
    if request.plan_options.container == IN_PLACE:
        raise UsageError(
            "images that stay in their archive are not uploaded; index them in a folder", path=url
        )
    refuse_server(place)
    from .storing import Storing  # start-up time: asyncio

    storing = Storing(request.output, RetryPolicy(retries, timeout_s), request.options, workers, progress)
    recognised = request.recognised()
    progress.note(f"source: {recognised.description}")
    request.check_outputs(recognised)
    problems = Problems()
    prepared = prepare(recognised, request, problems)
    problems.raise_all()
    note_untrained(prepared, progress)
    places = {one.output: place if split else place.child(one.planned.split) for one in prepared}
    again = "the same command without --restart" if request.options.restart else "the same command"
    with noting_kept(lambda: kept_of(prepared, of_split=len(prepared) > 1), again):
        return [storing.converted(one, places[one.output]) for one in prepared]


def default_scratch(place: Location) -> Path:
    """Return the scratch folder of conversions to a place: in the user's folder of caches."""
    caches = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return caches / "shardprep" / "scratch" / hashlib.sha256(place.url.encode()).hexdigest()[:16]
