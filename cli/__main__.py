"""The entry point of ``python -m shardprep.cli``, which is ``prep``."""

from .main import main

main()
