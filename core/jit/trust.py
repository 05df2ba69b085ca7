"""Who may have written a file: a module is code that runs as this process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from attnloom.core.errors import CacheUnusable


def refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Refuse a file or folder that others could have written.

    Raises:
        CacheUnusable: it belongs to another user, or others may write it.
    """
    # root can write anywhere anyway, and owns the caches that come with a container image.
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheUnusable(
            f"refusing the cache at {path}: it belongs to user {status.st_uid}, not to user {os.geteuid()}, and a "
            "module in it would run as this process. Set ATTNLOOM_CACHE_DIR to a folder of your own.",
            folder=path,
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheUnusable(
            f"refusing the cache at {path}: its mode {stat.S_IMODE(status.st_mode):04o} lets others write it, and a "
            f"module in it would run as this process. If you trust what is in it: chmod -R go-w {path}",
            folder=path,
        )
