"""Errors a user can act on: each says what was expected, what came, and what to do; none needs a traceback.

The exit codes are part of the command line's contract:

| code | meaning |
|---|---|
| 0 | done, or already complete |
| 1 | the run failed (disk full, a value that is not finite, a defect): run the same command again to go on |
| 2 | usage: a flag or a config file is wrong |
| 3 | input: the corpus, the model or an existing store does not fit |
| 4 | `verify` found damage, or rows that are missing |
| 130, 143 | stopped by Ctrl-C, by SIGTERM: the same command goes on |
"""

from __future__ import annotations


class PermafrostError(Exception):
    """The run failed; finished shards are kept."""

    exit_code = 1


class UsageError(PermafrostError):
    """A flag or a config file is wrong."""

    exit_code = 2


class InputError(PermafrostError):
    """The corpus, the model or an existing store does not fit what was asked."""

    exit_code = 3


class DamageError(PermafrostError):
    """A store holds bytes that are not what was written, or lacks rows."""

    exit_code = 4
