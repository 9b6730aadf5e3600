"""What the simulator does to each request, and when: Script, its one-line form, and the draw for one attempt."""

from __future__ import annotations

import difflib
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from beam_llm.errors import ConfigError

CONNECTION_FAULTS = (
    "reset",  # connection reset instead of an answer
    "close",  # connection closed in good order, no answer
    "truncate",  # half of the body, then closed
    "stall",  # not one byte until the client leaves
    "stall_body",  # half of the body, then silence until the client leaves
)
BODY_FAULTS = (
    "html",  # 502 with a proxy's HTML page
    "error_in_200",  # status 200, an error object for a body
    "empty_choices",
    "null_content",
    "not_json",  # status 200, a body that is no JSON
)
FAULTS = CONNECTION_FAULTS + BODY_FAULTS
"""Names that `Script.faults` takes."""

QUICK_FAULTS = tuple(name for name in FAULTS if not name.startswith("stall"))
"""The default of `Script.faults`: a stall lasts as long as the client's read timeout, so it must be asked for."""

REFUSED_AT_ONCE = frozenset({401, 403, 404, 413, 429, 503, 529})
"""Statuses that a real server sends before it works on the request; the others come after the latency."""

LATENCY_CAP = 40
"""A drawn latency is at most this many medians, so that one draw cannot hold up a whole test."""

NEEDS = {
    "latency_sigma": ("latency_ms",),
    "slow_ms": ("slow_rate",),
    "error_statuses": ("error_rate", "fail_first"),
    "fail_status": ("fail_rate",),
    "fail_code": ("fail_rate",),
    "faults": ("fault_rate",),
}
"""Keys that do nothing by themselves: a line that names one must name one of these too."""


@dataclass(frozen=True)
class Script:
    """How the simulator behaves; without arguments every good request is answered at once. Rates are shares, 0 to 1.

    Args:
        latency_ms: Median time to an answer.
        latency_sigma: Spread of the latency (log-normal); 0 = always the median.
        slow_rate: Share of attempts that take `slow_ms` instead.
        slow_ms: Latency of those.
        error_rate: Share of attempts that get one of `error_statuses`: transient, the next attempt is drawn anew.
        error_statuses: HTTP statuses of transient errors, each equally likely.
        retry_after_s: `Retry-After` sent with every 429 and 503; None sends no such header.
        fail_first: Every body gets a transient error the first so many times that it is sent.
        fail_rate: Share of prompts that fail however often they are sent; see `is_doomed`.
        fail_status: HTTP status of those.
        fail_code: `code` of the error object of those; empty uses the usual one of the status.
        fault_rate: Share of attempts that get one of `faults`, drawn anew for each attempt.
        faults: Names from `FAULTS`, each equally likely.
        hold_until: Answer nothing until so many requests are open at once, then hold no more; 0 = no such barrier.
        max_open: More requests than this open at once get a 429; 0 = no limit.
        max_body_bytes: Larger request bodies get a 413.
        strict_fields: Whether a field that neither OpenAI nor vLLM knows is a 400.
        models: Names that are served, any other is a 404; empty serves every name.
        api_key: Bearer token that requests must carry; empty asks for none.
        seed: Seed of every draw.

    Raises:
        ConfigError: A value out of its range.
    """

    latency_ms: float = 0.0
    latency_sigma: float = 0.0
    slow_rate: float = 0.0
    slow_ms: float = 10_000.0
    error_rate: float = 0.0
    error_statuses: tuple[int, ...] = (500, 429)
    retry_after_s: float | None = None
    fail_first: int = 0
    fail_rate: float = 0.0
    fail_status: int = 500
    fail_code: str = ""
    fault_rate: float = 0.0
    faults: tuple[str, ...] = QUICK_FAULTS
    hold_until: int = 0
    max_open: int = 0
    max_body_bytes: int = 64 * 2**20
    strict_fields: bool = False
    models: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_range(spec.name, getattr(self, spec.name))
        for status in (*self.error_statuses, self.fail_status):
            if not 400 <= status <= 599:
                raise ConfigError(f"error_statuses and fail_status must be HTTP errors, 400 to 599, got {status}")
        for name in self.faults:
            if name not in FAULTS:
                raise ConfigError(f"unknown fault {name!r}{_suggest(name, FAULTS)}; faults are {', '.join(FAULTS)}")
        if not self.error_statuses or not self.faults:
            raise ConfigError("error_statuses and faults must not be empty; for none, set their rate to 0")
        if any("," in name for name in self.models):
            raise ConfigError(f"models: a name cannot contain a comma, got {self.models}")
        if 0 < self.max_open < self.hold_until:
            raise ConfigError(f"hold_until={self.hold_until} can never be reached with max_open={self.max_open}")

    @classmethod
    def from_query(cls, query: str, base: Script | None = None) -> Script:
        """The script that a line such as `latency_ms=200&error_rate=0.05&error_statuses=500,429` names.

        Args:
            query: `key=value` pairs joined by `&`, with or without a leading `?`; lists are comma-separated.
            base: Supplies what the line leaves out; None is `Script()`.

        Raises:
            ConfigError: An unknown or repeated key, a value of the wrong kind or range, or a key without effect.
        """
        base = base or cls()
        values: dict[str, Any] = {}
        for key, text in parse_qsl(query.strip().removeprefix("?"), keep_blank_values=True):
            if key not in _PARSERS:
                raise ConfigError(
                    f"simulator: unknown key {key!r} (value {text!r}){_suggest(key, _PARSERS)}; "
                    f"known keys: {', '.join(_PARSERS)}"
                )
            if key in values:
                raise ConfigError(f"simulator: {key} is given twice")
            values[key] = _parse(key, text)
        script = replace(base, **values)
        for key in values.keys() & NEEDS.keys():
            if not any(other in values or getattr(script, other) for other in NEEDS[key]):
                raise ConfigError(f"simulator: {key} does nothing unless {' or '.join(NEEDS[key])} is set too")
        return script

    def as_query(self) -> str:
        """The line that `from_query` reads back to this script; empty for the default."""
        changed = [spec.name for spec in fields(self) if getattr(self, spec.name) != spec.default]
        enabling = (name for key in changed for name in NEEDS.get(key, ()))
        line = {}
        for name in dict.fromkeys((*changed, *enabling)):
            value = getattr(self, name)
            line[name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return urlencode(line, safe=",")


class Verdict(NamedTuple):
    """What one attempt gets: wait `delay_s`, then `status`; `fault` is empty for a plain answer."""

    delay_s: float
    status: int
    fault: str


def is_doomed(prompt_text: str, fail_rate: float) -> bool:
    """Whether a request with this prompt fails at every attempt under `Script.fail_rate`.

    Args:
        prompt_text: Text of the last user message; several text parts are joined by a line feed. Images do not count.
        fail_rate: The script's share, 0 to 1.
    """
    digest = hashlib.blake2b(prompt_text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fail_rate * 2.0**64


def draw_verdict(script: Script, prompt_text: str, attempt: int, rng: random.Random) -> Verdict:
    """Decides one attempt.

    Args:
        script: The behaviour asked for.
        prompt_text: As in `is_doomed`.
        attempt: How often this body has been sent, 1 = the first time.
        rng: Source of the draws that differ from attempt to attempt.
    """
    status, fault = 200, ""
    if script.fail_rate and is_doomed(prompt_text, script.fail_rate):
        status, fault = script.fail_status, "permanent"
    elif attempt <= script.fail_first or (script.error_rate and rng.random() < script.error_rate):
        status, fault = rng.choice(script.error_statuses), "transient"
    elif script.fault_rate and rng.random() < script.fault_rate:
        fault = rng.choice(script.faults)
    if status in REFUSED_AT_ONCE:
        return Verdict(0.0, status, fault)
    if script.slow_rate and rng.random() < script.slow_rate:
        return Verdict(script.slow_ms / 1000, status, fault)
    return Verdict(draw_latency_s(script.latency_ms, script.latency_sigma, rng), status, fault)


def draw_latency_s(median_ms: float, sigma: float, rng: random.Random) -> float:
    """A log-normal latency in seconds with this median, capped at `LATENCY_CAP` medians."""
    if sigma and median_ms:
        median_ms *= min(LATENCY_CAP, math.exp(min(sigma * rng.gauss(0.0, 1.0), 700.0)))
    return median_ms / 1000


def _check_range(name: str, value: Any) -> None:
    """Rates are 0 to 1; all other numbers are finite and not negative."""
    if isinstance(value, (bool, str, tuple)) or value is None:
        return
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a finite number >= 0, got {value}")
    if name.endswith("_rate") and value > 1:
        raise ConfigError(f"{name} is a share and must be between 0 and 1, got {value}")


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _parse_bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _parse_words(text))


_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "float": ("a number", float),
    "float | None": ("a number", float),
    "int": ("a whole number", int),
    "bool": ("true or false", _parse_bool),
    "str": ("text", str),
    "tuple[str, ...]": ("names joined by commas", _parse_words),
    "tuple[int, ...]": ("whole numbers joined by commas", _parse_numbers),
}
_PARSERS = {spec.name: _KINDS[str(spec.type)] for spec in fields(Script)}


def _parse(key: str, text: str) -> Any:
    wanted, parse = _PARSERS[key]
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ConfigError(f"simulator: {key} must be {wanted}, got {text!r}") from None
