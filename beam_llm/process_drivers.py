"""The drivers of this worker process, one for each config, shared by all DoFn instances and steps that use it.

`apache_beam.utils.shared.Shared` would keep only the last object alive.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from beam_llm.config import ChatConfig
from beam_llm.driver import Driver


@dataclass(slots=True)
class _Shared:
    driver: Driver
    users: int


_LOCK = threading.Lock()
_DRIVERS: dict[str, _Shared] = {}


def acquire_driver(config: ChatConfig) -> Driver:
    """The process's driver for this config, made at first use. Give it back with `release_driver`.

    Raises:
        ConfigError: The key cannot be sent in a header.
    """
    key = config.key()
    with _LOCK:
        if key not in _DRIVERS:
            _DRIVERS[key] = _Shared(Driver(config), 0)
        _DRIVERS[key].users += 1
        return _DRIVERS[key].driver


def release_driver(driver: Driver) -> None:
    """One user less; the last one closes it."""
    key = driver.config.key()
    with _LOCK:
        shared = _DRIVERS[key]
        shared.users -= 1
        if shared.users > 0:
            return
        del _DRIVERS[key]
    shared.driver.close()
