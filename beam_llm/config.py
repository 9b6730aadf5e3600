"""ChatConfig: everything that a worker needs to know, validated at construction, picklable, without secrets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from beam_llm.answers import FAILABLE
from beam_llm.endpoints import check_base_url
from beam_llm.errors import ConfigError
from beam_llm.field_types import check_field_types
from beam_llm.fingerprint import canonical_json
from beam_llm.images import ImagePolicy
from beam_llm.retry import RetryPolicy
from beam_llm.sampling import Dialect, SamplingParams, check_dialect, place_fields
from beam_llm.stores import check_store_url

MEGABYTE = 1 << 20

FINISHED = ("stop", "tool_calls")
"""Finish reasons of answers that no rerun would better."""

_ABOVE_ZERO = ("max_in_flight_mb", "connect_timeout_s", "read_timeout_s")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How to ask: where, what, how much at once, how patiently.

    Args:
        base_urls: One base URL or several (a tuple), for example `http://localhost:8000/v1`.
        model: Used where the request names none; None if every request does.
        api_key_env: Name of the environment variable that holds the key, read on the worker. None, or a variable that
            is not set: no Authorization header. The key itself is never part of the config.
        api_key_secret: Google Secret Manager's name of the key (`projects/P/secrets/S/versions/V`), read on the worker
            instead of the variable; None = the variable.
        dialect: Whose body fields are meant.
        sampling: Defaults under what the request says.
        system_prompt: Put in front of messages that do not begin with one.
        images: What becomes of pictures.
        retry: When and how a request is tried again.
        max_in_flight: Open requests per worker process.
        max_in_flight_mb: Megabytes of bodies not yet sent, per worker process.
        requests_per_minute: For one worker process; None = no limit.
        tokens_per_minute: Of prompts and answers, for one worker process; None = no limit.
        connect_timeout_s: To open a connection.
        read_timeout_s: Longest silence while waiting for an answer.
        deadline_s: For one request over all its attempts; None = only the other limits.
        fail_on: Answers that count as failures: of `truncated`, `refused`, `filtered`. Else they are completions whose
            record says so.
        batch_size: Rows handed to the DoFn at once.
        response_store: Where finished answers are kept, and looked up before anything is sent: `sqlite:///file.db`,
            `redis://…`, `gs://bucket/prefix/`; None = nowhere. `$NAME` in it is replaced on the worker, so that a
            password need not stand here.
        store_namespace: Part of the store's key: keeps jobs apart that share ids, model name and questions.
        stored_finish_reasons: Answers with another finish reason are not kept, and asked again by a rerun.

    Raises:
        ConfigError: Names the field, the value and the way out.
    """

    base_urls: tuple[str, ...]
    model: str | None = None
    api_key_env: str | None = "OPENAI_API_KEY"
    api_key_secret: str | None = None
    dialect: Dialect = Dialect.GENERIC
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system_prompt: str | None = None
    images: ImagePolicy = field(default_factory=ImagePolicy)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_in_flight: int = 1024
    max_in_flight_mb: float = 128
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    connect_timeout_s: float = 30
    read_timeout_s: float = 1800
    deadline_s: float | None = None
    fail_on: tuple[str, ...] = ()
    batch_size: int = 128
    response_store: str | None = None
    store_namespace: str = ""
    stored_finish_reasons: tuple[str, ...] = FINISHED

    def __post_init__(self) -> None:
        if isinstance(self.base_urls, str):
            object.__setattr__(self, "base_urls", (self.base_urls,))
        object.__setattr__(self, "dialect", _dialect(self.dialect))
        check_field_types(self)
        if not self.base_urls:
            raise ConfigError("base_urls is empty: give at least one, such as http://localhost:8000/v1")
        object.__setattr__(self, "base_urls", tuple(check_base_url(url) for url in self.base_urls))
        for name in ("max_in_flight", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in (*_ABOVE_ZERO, "requests_per_minute", "tokens_per_minute", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, got {value}")
        if unknown := [kind for kind in self.fail_on if kind not in FAILABLE]:
            raise ConfigError(f"fail_on must be of {', '.join(FAILABLE)}, got {', '.join(unknown)}")
        if self.response_store is not None:
            check_store_url(self.response_store)
        check_dialect(place_fields(self.sampling.fields(), self.dialect), self.dialect)

    @property
    def max_in_flight_bytes(self) -> int:
        """`max_in_flight_mb` in bytes."""
        return int(self.max_in_flight_mb * MEGABYTE)

    def key(self) -> str:
        """The same for equal configs, in every process: what a process's driver is shared by."""
        return blake2b(canonical_json(asdict(self)), digest_size=16).hexdigest()


def _dialect(value: str) -> Dialect:
    try:
        return Dialect(value)
    except ValueError:
        known = ", ".join(Dialect)
        raise ConfigError(f"dialect must be one of {known}, got {value!r}") from None
