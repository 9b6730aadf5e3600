"""What a worker process may use: open files, and how often Python looks for garbage."""

from __future__ import annotations

import gc

from beam_llm.errors import ConfigError

_OTHER_FILES = 128
"""Descriptors besides the connections: Beam's channels, input and output files, pictures being read."""


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files as far as `count` connections need.

    Raises:
        ConfigError: The hard limit does not allow it; names the limit and the way out.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"max_in_flight={count} needs {needed} open files, but the hard limit of this process is {hard}: "
            f"raise it (ulimit -Hn), or set max_in_flight to {max(1, hard - _OTHER_FILES)} or less"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def most_connections() -> int | None:
    """Connections for which `allow_connections` can make room; None = any number."""
    try:
        import resource
    except ImportError:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else max(1, hard - _OTHER_FILES)


_GC_THRESHOLD = 20_000
"""New objects between two collections. Python's default of 700 is made for programs that keep little: with a thousand
open requests beside all that Beam has loaded, collections took 45 % of the CPU of a short request."""


def collect_garbage_less_often() -> None:
    """Raises this process's threshold for garbage collections, unless it is higher already or they are off."""
    first, second, third = gc.get_threshold()
    if 0 < first < _GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD, second, third)
