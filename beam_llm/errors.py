"""Why a request failed: ErrorKind, the Verdict on one try, the exception tree, and what an exception means."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

MAX_MESSAGE_CHARS = 500


class ErrorKind(str, Enum):
    """One word for every way in which a request can fail; the README's page on failures lists them all."""

    BAD_INPUT = "bad_input"
    BAD_IMAGE = "bad_image"
    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    QUOTA = "quota"
    CONTEXT_LENGTH = "context_length"
    CONTENT_FILTER = "content_filter"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    CONNECT = "connect"
    DISCONNECTED = "disconnected"
    DEADLINE = "deadline"
    EMPTY_CHOICES = "empty_choices"
    NULL_CONTENT = "null_content"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    FILTERED = "filtered"
    INVALID_RESPONSE = "invalid_response"
    ABORTED = "aborted"
    INTERNAL = "internal"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one try came to, and what may follow from it.

    Args:
        kind: Why it failed; None for an answer to hand on.
        retryable: Whether sending the same bytes again can help.
        message: The server's own words where it sent any, else what happened. Never empty, 500 characters at most.
        code: The server's `code`, or else its `type`; None if it named neither.
        stops_run: Evidence that no other row will fare better: bad key, no permission, quota gone, unknown model or
            path, a parameter that the model refuses, an untrusted certificate. It is not proof (a router's 403 can be
            about one prompt): stop only when several such failures came in and not one answer did. Never set together
            with `retryable`. A plain 400 is about its row and does not count.
        shrinks: A sign of overload on which the in-flight limit should go down: `slow_down`, 503, 529, timeouts,
            refused or reset connections. A plain 429 is the rate limit's business.
        excerpt: What the server sent, cut to 2 KB of UTF-8; None for an answer, or if it sent nothing.
    """

    kind: ErrorKind | None
    retryable: bool
    message: str
    code: str | None = None
    stops_run: bool = False
    shrinks: bool = False
    excerpt: str | None = None


class BeamLLMError(Exception):
    """Base of everything that beam_llm raises on purpose."""


class ConfigError(BeamLLMError, ValueError):
    """A setting that cannot work; the message names the field, the value and the way out."""


class RequestError(BeamLLMError):
    """One row that cannot be sent. It becomes a FailedRequest at the step that caught it.

    Args:
        message: The reason, with the field and the value.
        kind: `BAD_INPUT` for the row, `BAD_IMAGE` for one of its pictures.
    """

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.BAD_INPUT) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, ErrorKind]]:
        return type(self), (self.message, self.kind)


class RunStoppedError(BeamLLMError):
    """The run cannot succeed (bad key, unknown model, quota gone, endpoint not there); says why in one line."""


# A server may repeat the key that it was sent; exception texts may hold a header or a proxy's password.
_SECRET = re.compile(r"\b(sk-|bearer\s+(?=\S*\d))[\w.~+/=*-]{6,}|(?<=://)[^\s/@]+(?=@)", re.IGNORECASE)


def redact(text: str) -> str:
    """Returns the text with `sk-…` keys, bearer tokens and user names in URLs replaced by `***`."""
    return _SECRET.sub(lambda match: (match[1] or "") + "***", text)


def clip(text: str) -> str:
    """Makes one redacted line of at most `MAX_MESSAGE_CHARS` characters; empty if the text is blank."""
    line = redact(" ".join(text[: 8 * MAX_MESSAGE_CHARS].split()))
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Allowed:
    """Seconds that one try may take: to connect, of silence, and in all."""

    connect_s: float | None = None
    read_s: float | None = None
    total_s: float | None = None


def classify_exception(exc: Exception, *, sent: bool, allowed: Allowed | None = None) -> Verdict:
    """Judges a try that ended without a whole response.

    Args:
        exc: What aiohttp, asyncio or the operating system raised.
        sent: Whether the whole body had gone out. Then the server may have generated an answer and billed it, so a lost
            connection is `DISCONNECTED`; before that it is `CONNECT`, and trying again costs nothing.
        allowed: The times that the try was given; the message names the one that ran out. None leaves the number out.

    Returns:
        A verdict with a kind. Its message is our own: aiohttp's texts quote URLs and may be empty.
    """
    if isinstance(exc, (asyncio.TimeoutError, TimeoutError)) and getattr(exc, "errno", None) is None:
        return _judge_timeout(exc, sent, allowed or Allowed())
    for types, judge in _BY_EXCEPTION:
        if isinstance(exc, types):
            return judge(exc, sent)
    return Verdict(ErrorKind.INVALID_REQUEST, False, clip(f"could not send: {type(exc).__name__}: {exc}"))


def _judge_timeout(exc: Exception, sent: bool, allowed: Allowed) -> Verdict:
    phase = "while waiting for the answer" if sent else "while sending the request"
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return _no_connection(f"connect timeout: no connection{_within(allowed.connect_s)}", shrinks=True)
    if isinstance(exc, aiohttp.ServerTimeoutError):
        text = f"read timeout: nothing was received{_within(allowed.read_s)} {phase}"
    else:
        text = f"total timeout: not finished{_within(allowed.total_s)}, {phase}"
    return Verdict(ErrorKind.TIMEOUT, True, text, shrinks=True)


def _within(limit_s: float | None) -> str:
    return "" if limit_s is None else f" within {limit_s:g} s"


def _no_connection(text: str, *, permanent: bool = False, shrinks: bool = False) -> Verdict:
    return Verdict(ErrorKind.CONNECT, not permanent, clip(text), stops_run=permanent, shrinks=shrinks)


def _judge_address(exc: Exception, _sent: bool) -> Verdict:
    return _no_connection(f"the address cannot be used ({type(exc).__name__}): check base_url", permanent=True)


def _judge_proxy(exc: aiohttp.ClientHttpProxyError, _sent: bool) -> Verdict:
    permanent = exc.status < 500 and exc.status not in (408, 429)
    return _no_connection(f"the proxy answered {exc.status} {exc.message}", permanent=permanent)


def _judge_certificate(exc: Exception, _sent: bool) -> Verdict:
    cause = getattr(exc, "certificate_error", exc)
    reason = getattr(cause, "verify_message", "") or type(cause).__name__
    return _no_connection(f"the server's certificate is not trusted: {reason}", permanent=True)


def _judge_tls(exc: aiohttp.ClientConnectorSSLError, _sent: bool) -> Verdict:
    # WRONG_VERSION_NUMBER is what an http:// port answers to a TLS hello; other handshakes may fail under load.
    reason = getattr(exc.os_error, "reason", None) or "no reason given"
    text = f"TLS handshake with {exc.host}:{exc.port} failed: {reason}"
    return _no_connection(text, permanent=reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"))


def _judge_connector(exc: aiohttp.ClientConnectorError, sent: bool) -> Verdict:
    if exc.errno in _NO_DESCRIPTORS:
        return _judge_lost_connection(exc, sent)
    what = "the proxy" if isinstance(exc, aiohttp.ClientProxyConnectionError) else "the server"
    reason = exc.os_error.strerror or type(exc.os_error).__name__
    text = f"could not connect to {what} at {exc.host}:{exc.port}: {reason}"
    return _no_connection(text, shrinks=not isinstance(exc, aiohttp.ClientConnectorDNSError))


def _judge_payload(exc: aiohttp.ClientPayloadError, _sent: bool) -> Verdict:
    reason = getattr(exc.__cause__, "message", "the connection was lost")
    if isinstance(exc.__cause__, ContentEncodingError):
        return Verdict(ErrorKind.INVALID_RESPONSE, True, clip(f"the answer cannot be decompressed: {reason}"))
    return Verdict(ErrorKind.DISCONNECTED, True, clip(f"the answer broke off: {reason}"))


def _judge_response(exc: aiohttp.ClientResponseError, _sent: bool) -> Verdict:
    # The status 400 in these is aiohttp's own; the server sent none that could be read.
    return Verdict(ErrorKind.INVALID_RESPONSE, True, clip(f"not a valid HTTP response: {exc.message}"))


def _judge_lost_connection(exc: Exception, sent: bool) -> Verdict:
    number = getattr(exc, "errno", None)
    if number in _NO_DESCRIPTORS:
        text = "out of file descriptors: lower max_in_flight, or raise the limit on open files (ulimit -n)"
        return _no_connection(text, shrinks=True)
    reason = getattr(exc, "strerror", None) or type(exc).__name__
    # A clean close is mostly a keep-alive connection that the server gave up just before its reuse: no overload.
    shrinks = not isinstance(exc, aiohttp.ServerDisconnectedError)
    if sent:
        text = f"disconnected after the request was sent, before an answer came: {reason}"
        return Verdict(ErrorKind.DISCONNECTED, True, clip(text), shrinks=shrinks)
    return _no_connection(f"the connection was lost before the request was sent: {reason}", shrinks=shrinks)


_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

# The first match counts: subclasses stand before their bases.
_BY_EXCEPTION: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Callable[[Any, bool], Verdict]], ...] = (
    ((aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, aiohttp.TooManyRedirects), _judge_address),
    (aiohttp.ClientHttpProxyError, _judge_proxy),
    (
        (aiohttp.ClientConnectorCertificateError, aiohttp.ServerFingerprintMismatch, ssl.SSLCertVerificationError),
        _judge_certificate,
    ),
    (aiohttp.ClientConnectorSSLError, _judge_tls),
    (aiohttp.ClientConnectorError, _judge_connector),
    (aiohttp.ClientPayloadError, _judge_payload),
    (aiohttp.ClientResponseError, _judge_response),
    ((aiohttp.ClientConnectionError, OSError), _judge_lost_connection),
)
