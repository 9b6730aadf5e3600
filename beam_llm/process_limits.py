"""What a worker process may use: open files, garbage collections, and the memory that large buffers leave behind."""

from __future__ import annotations

import ctypes
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


_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
"""Parameters of glibc's mallopt, from its malloc.h."""

_LARGE_BUFFER = 1 << 20
"""Bytes. Smaller values save little memory more and cost CPU: the kernel hands out such buffers page by page."""

_KEPT_FREE = 64 << 20
"""Bytes that may lie free at the end of the heap. At malloc's own 128 KB each batch of pictures would be given back and
asked for again, which takes more CPU than encoding them: 240 us instead of 100 for a file of 200 KB."""


def return_large_buffers() -> None:
    """Lets memory of large buffers (pictures, bodies) go back to the system when they are freed; on glibc only.

    By itself malloc raises its threshold as such buffers are freed, and from then on keeps them in arenas, one for each
    thread, between small objects that live on: 20,000 pictures of 0.2 to 0.8 MB left a process at 2.3 GB, and at 0.4 GB
    with these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE_BUFFER)
        mallopt(_TRIM_THRESHOLD, _KEPT_FREE)
