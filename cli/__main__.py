"""``python -m shardprep.cli`` is ``prep``."""

from .main import main

main()
