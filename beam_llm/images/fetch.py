"""Download a picture over http(s): the URL as it was given, bounded in bytes and time, not from private addresses."""

from __future__ import annotations

import functools
import http.client
import ipaddress
import random
import socket
import ssl
import string
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import ImagePolicy
from beam_llm.version import __version__

_RETRIES = 3
_FIRST_BACKOFF_S = 0.5
_CHUNK_BYTES = 1 << 16
_RETRYABLE_STATUS = (408, 425, 429)
_PLATFORM_ADDRESSES = ("168.63.129.16",)
"""Azure's host agent: a public address on paper, the machine's own platform in fact."""


class TransientReadError(Exception):
    """A read that may work a moment later; the message is the reason to report if it does not."""


def with_retries(
    read: Callable[[], bytes], sleep: Callable[[float], None] = time.sleep, rng: Callable[[], float] = random.random
) -> bytes:
    """Call `read`, up to three times more if it raises TransientReadError, with full jitter between.

    Raises:
        RequestError: Every try failed, or `read` raised it, which is final.
    """
    for attempt in range(_RETRIES):
        try:
            return read()
        except TransientReadError:  # noqa: PERF203 - the loop is the retry
            sleep(rng() * _FIRST_BACKOFF_S * 2**attempt)
    try:
        return read()
    except TransientReadError as error:
        raise RequestError(f"{error} ({_RETRIES + 1} tries)", ErrorKind.BAD_IMAGE) from error


def fetch_once(url: str, policy: ImagePolicy, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Download a picture, in one try. Proxies are those of the environment, as for every tool.

    Args:
        url: Sent as it is, escapes and all; only what may not stand in a URL (blanks, other alphabets) is escaped.
        policy: Its limits, user agent and whether private addresses are allowed.
        clock: Seconds; `download_timeout_s` bounds each wait on the socket and, checked between reads, the whole.

    Raises:
        TransientReadError: Connection trouble, a time-out, a short read, or a status that asks to come back.
        RequestError: Anything that will not change.
    """
    deadline = clock() + policy.download_timeout_s
    agent = policy.user_agent or f"beam_llm/{__version__}"
    headers = {"User-Agent": agent, "Accept": "image/*, */*;q=0.5"}
    proxies = tuple(sorted(urllib.request.getproxies().items()))
    try:
        request = urllib.request.Request(quote(url, safe=string.punctuation), headers=headers)  # noqa: S310 - http(s)
        opener = _opener(policy.allow_private_addresses, proxies)
        with opener.open(request, timeout=policy.download_timeout_s) as response:
            return _read_body(response, policy.max_download_bytes, deadline, clock)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"the server answers {error.code} {error.reason}"
        if error.code >= 500 or error.code in _RETRYABLE_STATUS:
            raise TransientReadError(reason) from error
        raise _refused(reason) from error
    except (http.client.InvalidURL, ValueError) as error:
        raise _refused(f"is no valid URL ({error})") from error
    except (OSError, http.client.HTTPException) as error:  # URLError, time-outs, resets, IncompleteRead, …
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = f"cannot be downloaded ({type(cause).__name__}: {cause})"
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise _refused(reason) from error
        raise TransientReadError(reason) from error


def _refused(reason: str) -> RequestError:
    return RequestError(reason, ErrorKind.BAD_IMAGE)


def _read_body(response: Any, limit: int, deadline: float, clock: Callable[[], float]) -> bytes:
    """The body, if it is whole and within the limits; http.client checks the length of chunked ones only."""
    announced = response.headers.get("Content-Length", "")
    length = int(announced) if announced.isdecimal() else None
    body = bytearray()
    while length is None or len(body) < length <= limit:
        if clock() > deadline:
            raise TransientReadError("the download took longer than download_timeout_s")
        chunk = response.read1(_CHUNK_BYTES)
        if not chunk:
            break
        body += chunk
        if len(body) > limit:
            break
    if max(len(body), length or 0) > limit:
        raise _refused(f"is larger than max_download_bytes ({limit})")
    if length is not None and len(body) < length:
        raise TransientReadError(f"the download ended after {len(body)} of {length} bytes")
    return bytes(body)


def is_private(address: str) -> bool:
    """Whether an IP address is anything but a public host's: private, loopback, link-local, metadata, reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_private(str(inner))
    return not ip.is_global or ip.is_multicast or str(ip) in _PLATFORM_ADDRESSES


def _refuse_private(address: str) -> None:
    if is_private(address):
        raise _refused(f"leads to the private address {address}; allow_private_addresses would permit it")


def _refuse_private_host(request: urllib.request.Request) -> None:
    """Look the target up before anything is sent. Behind a proxy this is all that can be known of it."""
    host = urlsplit(request.full_url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # only the proxy may know the name; without a proxy the connection fails with the same error
        return
    for *_, address in found:
        _refuse_private(str(address[0]))


def _is_proxied(request: urllib.request.Request) -> bool:
    return request.host != urlsplit(request.full_url).netloc


class _PublicConnection(http.client.HTTPConnection):
    """Looks at the peer again once connected: a name may have changed its address since it was looked up."""

    def connect(self) -> None:
        super().connect()
        _refuse_private(self.sock.getpeername()[0])


class _PublicTLSConnection(http.client.HTTPSConnection):
    """The same over TLS."""

    def connect(self) -> None:
        super().connect()
        _refuse_private(self.sock.getpeername()[0])


class _PublicHTTP(urllib.request.HTTPHandler):
    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        _refuse_private_host(request)
        return super().do_request_(request)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPConnection if _is_proxied(req) else _PublicConnection, req)


class _PublicHTTPS(urllib.request.HTTPSHandler):
    def https_request(self, request: urllib.request.Request) -> urllib.request.Request:
        _refuse_private_host(request)
        return super().do_request_(request)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection if _is_proxied(req) else _PublicTLSConnection
        return self.do_open(connection, req, context=_tls_context())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Stays with http and https, and follows 308 too, which Python 3.10 does not know."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith(("http://", "https://")):
            fp.close()
            raise _refused("the server redirects to something other than http(s)")
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


@functools.lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


@functools.lru_cache(maxsize=8)
def _opener(allow_private: bool, proxies: tuple[tuple[str, str], ...]) -> urllib.request.OpenerDirector:
    """An opener for http and https alone: no `file:`, `ftp:` or `data:`, not even after a redirect."""
    plain = (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=_tls_context()))
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(dict(proxies)),
        *(plain if allow_private else (_PublicHTTP(), _PublicHTTPS(context=_tls_context()))),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
