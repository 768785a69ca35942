"""Reads that return less than was requested, as the system's may."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static size_t most(int fd, size_t count) {
    char link[64], path[PATH_MAX];
    const char *below = getenv("CUT_BELOW");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    size_t given = strlen(below);
    return length >= (ssize_t)given && !strncmp(path, below, given) && count > 10 ? 10 : count;
}

ssize_t read(int fd, void *to, size_t count) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    return real(fd, to, most(fd, count));
}

ssize_t pread64(int fd, void *to, size_t count, off64_t at) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    return real(fd, to, most(fd, count), at);
}

ssize_t pread(int fd, void *to, size_t count, off_t at) { return pread64(fd, to, count, at); }

ssize_t preadv64(int fd, const struct iovec *to, int parts, off64_t at) {
    return pread64(fd, to[0].iov_base, to[0].iov_len, at);
}

ssize_t preadv(int fd, const struct iovec *to, int parts, off_t at) { return preadv64(fd, to, parts, at); }
"""


def cut_below(folder: Path, library: Path) -> dict[str, str]:
    """The environment of a process in which each read of a file below the folder returns at most 10 bytes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    code = library.with_suffix(".c")
    code.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code, "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library), "CUT_BELOW": str(folder)}
