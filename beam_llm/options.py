"""What the command line's flags mean as a ChatConfig and as columns of a row."""

from __future__ import annotations

import math
import os

from beam_llm.config import FINISHED, ChatConfig
from beam_llm.errors import ConfigError
from beam_llm.files import FileType
from beam_llm.flags import ChatOptions, names
from beam_llm.formats.rows import RowColumns
from beam_llm.images import ImagePolicy
from beam_llm.io import Format
from beam_llm.retry import RetryPolicy
from beam_llm.sampling import Dialect, SamplingParams

_BASE_URL_ENV = ("OPENAI_BASE_URL", "OPENAI_API_BASE")


def base_urls(options: ChatOptions) -> tuple[str, ...]:
    """The endpoints asked for, by flag or environment.

    Raises:
        ConfigError: None at all.
    """
    if options.base_url:
        return tuple(options.base_url)
    for name in _BASE_URL_ENV:
        if value := os.environ.get(name):
            return tuple(names(value))
    raise ConfigError(
        "no endpoint: give --base_url=http://host:port/v1 or set OPENAI_BASE_URL; --base_url=simulated tries things out"
    )


def chat_config(options: ChatOptions, urls: tuple[str, ...], processes: int | None) -> ChatConfig:
    """The config that the flags describe.

    Args:
        options: Our flags.
        urls: Endpoints, `simulated` already replaced by the simulator's URL.
        processes: Worker processes of a local run, which share the rate limits; None where the number is not known.

    Raises:
        ConfigError: A value that cannot work.
    """
    return ChatConfig(
        base_urls=urls,
        model=options.model,
        api_key_env=options.api_key_env,
        api_key_secret=options.api_key_secret,
        dialect=Dialect(options.dialect),
        sampling=_sampling(options),
        system_prompt=options.system_prompt,
        images=_images(options),
        retry=_retry(options),
        max_in_flight=options.max_in_flight,
        max_in_flight_mb=options.max_in_flight_mb,
        requests_per_minute=_part("requests_per_minute", options.requests_per_minute, processes),
        tokens_per_minute=_part("tokens_per_minute", options.tokens_per_minute, processes),
        connect_timeout_s=options.connect_timeout_s,
        read_timeout_s=options.read_timeout_s,
        deadline_s=options.deadline_s,
        response_store=_response_store(options, local=processes is not None),
        store_namespace=options.store_namespace,
        stored_finish_reasons=tuple(options.stored_finish_reasons or FINISHED),
        fail_on=tuple(options.fail_on or ()),
    )


def _response_store(options: ChatOptions, local: bool) -> str | None:
    """The store's URL. `auto` is a SQLite file beside local results, and objects beside results in a bucket."""
    if options.response_store == "none" or options.validate_only:
        return None
    if options.response_store != "auto":
        return options.response_store
    output = options.output or "."
    if output.startswith("gs://"):
        return f"{output.rstrip('/')}/responses/"
    # A worker on another machine would write a file that nobody finds again.
    return f"sqlite:///{os.path.abspath(output)}/responses.db" if local and "://" not in output else None


def _part(name: str, rate: float | None, processes: int | None) -> float | None:
    """A worker process's part of a rate for the whole run."""
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {rate}; leave it out for no limit")
    return rate / processes if rate is not None and processes else rate


def _retry(options: ChatOptions) -> RetryPolicy:
    backoff_s = options.max_backoff_s
    return RetryPolicy(
        max_retries=options.max_retries,
        initial_backoff_s=min(RetryPolicy().initial_backoff_s, backoff_s),
        max_backoff_s=backoff_s,
    )


def _sampling(options: ChatOptions) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        repetition_penalty=options.repetition_penalty,
        max_tokens=options.max_tokens,
        enable_thinking=options.enable_thinking,
        extra_body=options.extra_body or {},
    )


def _images(options: ChatOptions) -> ImagePolicy:
    return ImagePolicy(
        max_pixels=options.image_max_pixels,
        max_side=options.image_max_side,
        min_side=options.image_min_side,
        max_bytes=options.image_max_bytes,
        format=options.image_format,
        quality=options.image_quality,
        cache_bytes=int(options.image_cache_mb * 2**20),
        fetch_images=options.fetch_images,
        allow_private_addresses=options.allow_private_addresses,
        root=options.image_root,
    )


def row_columns(options: ChatOptions) -> RowColumns:
    """Which columns of `rows` input make a request."""
    return RowColumns(
        prompt=options.prompt,
        image_columns=tuple(options.image_column or ()),
        messages_column=options.messages_column,
    )


def output_format(options: ChatOptions, input_format: Format) -> Format:
    """The format of the results: that asked for, else that of the input; Parquet holds rows.

    Raises:
        ConfigError: Batch lines were asked for in Parquet.
    """
    if options.output_file_type == FileType.PARQUET:
        if options.output_format == Format.OPENAI_BATCH:
            raise ConfigError("output_file_type=parquet holds rows: leave out output_format=openai_batch")
        return Format.ROWS
    return Format(options.output_format) if options.output_format else input_format


def check_image_root(root: str | None) -> None:
    """Refuses a local folder of pictures that is not there.

    Raises:
        ConfigError: Names it.
    """
    if root is not None and "://" not in root and not os.path.isdir(root):
        raise ConfigError(f"image_root={root} is no folder on this machine")
