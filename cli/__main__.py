"""Run ``prep`` as ``python -m shardprep.cli``."""

from __future__ import annotations

from shardprep.cli.main import main

main()
