"""The entry point of ``python -m shardprep.cli``, which is ``prep``."""

from __future__ import annotations

from shardprep.cli.main import main

main()
