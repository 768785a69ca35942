"""The documents and the API as HTML: ``python -m sphinx -W -b html docs build/docs``."""

from importlib.metadata import version as version_of
from typing import Any

from shardprep.formats.runtime.owners import Owner

project = "shardprep"
author = "the shardprep authors"
release = version_of("shardprep")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"shardprep {release}"
html_copy_source = False
html_show_copyright = False  # the licence is in the repository

myst_heading_anchors = 4  # headings are link targets, as on a forge

# The frameworks need not be installed for their modules to be described.
autodoc_mock_imports = [
    "PIL",
    "albumentations",
    "jax",
    "keras",
    "prometheus_client",
    "tensorflow",
    "torch",
    "torchvision",
]
autodoc_default_options = {"members": True, "show-inheritance": True, "special-members": "__getitem__"}
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
autosummary_generate = False  # nothing is written into the sources

del Owner.__new__  # autodoc would show its (*args, **kwargs) in place of the arguments of Loader and others


def setup(app: Any) -> None:
    """Show the first line of a property as it is; napoleon takes what is before a colon for its type."""

    def begin_below(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        if what in ("property", "attribute", "data"):
            lines[:0] = ("..", "")  # a comment

    app.connect("autodoc-process-docstring", begin_below, priority=0)
