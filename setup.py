"""Restores the links in src/shardprep, which pip and uv unpack from a zip as files with their targets."""

from pathlib import Path

from setuptools import setup

for link in Path("src/shardprep").iterdir():
    if link.is_file() and not link.suffix:
        target = link.read_text("utf-8")
        link.unlink()
        link.symlink_to(target)

setup()
