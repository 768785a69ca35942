"""Files, processes and progress: what all of this package needs of the system."""

import os


def open_streams() -> None:
    """Open closed standard streams on /dev/null, here and for child processes.

    If 0, 1 or 2 is closed, as by ``2>&-``, a data file would get that number, and what a library prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
