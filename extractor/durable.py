"""Files that are whole or absent, whenever the power goes: temp file → write → fsync → rename → fsync the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMP_SUFFIX = ".partial"
_IOV_MAX = 1024

Buffer = bytes | memoryview


def write_durable(path: Path, buffers: Sequence[Buffer]) -> int:
    """Write the buffers, one after the other, as this file; returns the bytes written.

    Cost: two fsyncs, and one for each folder that is new.
    """
    make_folder(path.parent)
    temp = path.with_name(path.name + TEMP_SUFFIX)
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            size = _write_all(fd, buffers)
            os.fsync(fd)
        finally:
            os.close(fd)
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document durably."""
    write_durable(path, [json.dumps(document, indent=1, ensure_ascii=False).encode()])


def publish(temp: Path, path: Path) -> None:
    """Make a finished temp file durable under its final name."""
    fd = os.open(temp, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temp.replace(path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make the folder and those above it, their names durable too: an fsynced file in a lost folder is lost."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, buffers: Sequence[Buffer]) -> int:
    left = [memoryview(b).cast("B") for b in buffers if len(b)]
    total = sum(len(b) for b in left)
    at = 0
    while at < len(left):
        wrote = os.writev(fd, left[at : at + _IOV_MAX])
        while at < len(left) and wrote >= len(left[at]):
            wrote -= len(left[at])
            at += 1
        if wrote:
            left[at] = left[at][wrote:]
    return total
