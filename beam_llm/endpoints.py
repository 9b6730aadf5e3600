"""Where requests go: the URL that each form of base URL stands for, and the choice among several endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from beam_llm.errors import ConfigError

_VERSION = "/v1"
_EXPECTED = "base_url must be an http(s) URL such as http://localhost:8000/v1"


def check_base_url(base_url: str) -> str:
    """The base URL without outer white space.

    Raises:
        ConfigError: Not an http(s) URL with a host, or one with a user and password, which must not stand in options.
    """
    url = base_url.strip()
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # `[` without `]`, a port that is no number
        raise ConfigError(f"{_EXPECTED}, got {url!r} ({error})") from None
    if "@" in parts.netloc:
        shown = urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
        raise ConfigError(f"base_url must not carry a user or password, got {shown}; give the key by api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{_EXPECTED}, got {url!r}")
    return url


def request_url(base_url: str, path: str) -> str:
    """The URL that a request is posted to.

    | base_url | posted to, for `/v1/chat/completions` |
    | --- | --- |
    | `http://h`, `http://h/` | `http://h/v1/chat/completions` |
    | `http://h/v1`, `http://h/v1/` | `http://h/v1/chat/completions` |
    | `http://h/v1/chat/completions` | as given |
    | `http://h/api/v1/`, `http://h/v1beta/openai/` | that path + `/chat/completions` |
    | `https://h/openai/deployments/d?api-version=x` | that path + `/chat/completions?api-version=x` |

    Nothing is put behind a path that the user gave but the route itself, and no slash is doubled.

    Args:
        base_url: As the user gave it.
        path: `url` of a batch line, such as `/v1/chat/completions`.
    """
    parts = urlsplit(base_url)
    route = "/" + path.strip("/")
    if route.startswith(f"{_VERSION}/"):
        route = route[len(_VERSION) :]
    base = parts.path.rstrip("/")
    full = base if base.endswith(route) else (base or _VERSION) + route
    return urlunsplit((parts.scheme, parts.netloc, full, parts.query, ""))


class Endpoint:
    """One base URL and how many of this process's requests are open there."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.in_flight = 0
        self._urls: dict[str, str] = {}

    def url(self, path: str) -> str:
        """Where a request with this path is posted to."""
        if path not in self._urls:
            self._urls[path] = request_url(self.base_url, path)
        return self._urls[path]


class EndpointPool:
    """Picks the endpoint with the fewest open requests, in turn among equals."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self.endpoints = [Endpoint(url) for url in base_urls]

    def take(self) -> Endpoint:
        """The least loaded endpoint, counted as one request more; give it back with `release`."""
        endpoint = min(self.endpoints, key=lambda e: e.in_flight)
        endpoint.in_flight += 1
        if len(self.endpoints) > 1:
            self.endpoints.remove(endpoint)
            self.endpoints.append(endpoint)  # equals take turns
        return endpoint

    def release(self, endpoint: Endpoint) -> None:
        """Counts one request less."""
        endpoint.in_flight -= 1
