"""HeldDriver: an object's share in the driver of this process, and its API key in the environment."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.process_drivers import acquire_driver, release_driver

_KEY_ENV = "OPENAI_API_KEY"
_NUMBERS = itertools.count(1)


class HeldDriver:
    """Keeps connections open between calls, and a key where worker processes inherit it: nowhere else is it safe.

    Args:
        key: API key; None = that of `OPENAI_API_KEY`.

    Attributes:
        key_env: Name of the variable that holds the key.
    """

    def __init__(self, key: str | None) -> None:
        self.key_env = _KEY_ENV
        self._own_env: str | None = None
        self._driver: Driver | None = None
        self._lock = threading.Lock()
        if key is not None:
            self.key_env = self._own_env = f"BEAM_LLM_COMPAT_KEY_{next(_NUMBERS)}"
            os.environ[self._own_env] = key

    @contextmanager
    def driver(self, config: ChatConfig) -> Iterator[Driver]:
        """This process's driver, which is kept until `release`, or until something goes wrong with it."""
        driver = acquire_driver(config)
        try:
            with self._lock:
                if self._driver is None:
                    self._driver = acquire_driver(config)
            yield driver
        except BaseException:
            self._let_go()  # a driver that has stopped stays stopped
            raise
        finally:
            release_driver(driver)

    def release(self) -> None:
        """Gives everything back."""
        self._let_go()
        if self._own_env is not None:
            os.environ.pop(self._own_env, None)

    def _let_go(self) -> None:
        with self._lock:
            driver, self._driver = self._driver, None
        if driver is not None:
            release_driver(driver)
