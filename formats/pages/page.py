"""A page of HTML in one file, which asks nothing of any server and runs no program."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardprep.formats.system.sizes import count_of, size

from .charts import bars, histogram, scatter
from .shown_text import finalized, picture_uri, shown_name, shown_number, shown_share, shown_whole

FILTERS: dict[str, Callable[..., object]] = {
    "name": shown_name,
    "size": size,
    "number": shown_number,
    "whole": shown_whole,
    "share": shown_share,
    "counted": count_of,
    "uri": picture_uri,
}
"""What templates apply to values; as globals they are passed to charts."""

CHARTS: dict[str, Callable[..., object]] = {"histogram": histogram, "scatter": scatter, "bars": bars}


def page(template: str, *, title: str, **values: Any) -> str:
    """Return the page of a template in ``templates/`` (without ``.html``), which extends ``base.html``.

    ``title`` names the page; ``values`` are what the template uses. The page is complete: its style is in it,
    and its content security policy allows this style, pictures as data, and nothing else: no script, no style
    attribute, no request. Text of ``values`` is escaped and made printable. Equal values give equal pages.
    """
    style = stylesheet()
    template_of = _environment().get_template(f"{template}.html")
    css = Markup(style)  # noqa: S704 - the package's own file
    return template_of.render(title=title, style=css, policy=policy_of(style), **values)


def fragment(template: str, **values: Any) -> str:
    """Return what a template renders, without a page around: for a notebook, or a part of another page."""
    return _environment().get_template(f"{template}.html").render(**values)


def policy_of(style: str) -> str:
    """Return the content security policy of a page with this style sheet."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def stylesheet() -> str:
    """Return the style sheet of all pages: light and dark, narrow and wide, and in print."""
    return (resources.files(__package__) / "templates" / "style.css").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= FILTERS | CHARTS | {"zip": zip}
    return environment
