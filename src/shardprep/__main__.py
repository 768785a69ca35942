"""``python -m shardprep``: the command ``prep``, where its script is not on the PATH."""

from shardprep.cli.main import main

if __name__ == "__main__":
    main()
