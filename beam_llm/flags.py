"""The command line's flags: ChatOptions, how they are parsed, and what is said of a flag that nobody knows."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
from collections.abc import Callable
from typing import Any

import orjson
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm.errors import ConfigError
from beam_llm.sampling import Dialect

SIMULATED = "simulated"
"""The base URL that starts the simulator; its script may follow as a query."""


_ELSEWHERE = {
    # What other tools, and the class that this replaces, call it.
    "api_key": "a key is never a flag; put it into an environment variable and name that with --api_key_env",
    "key": "a key is never a flag; put it into an environment variable and name that with --api_key_env",
    **dict.fromkeys(
        ("concurrency", "max_concurrency", "thread_num", "worker_concurrency"), "it is --max_in_flight here"
    ),
    **dict.fromkeys(("workers", "num_procs", "processes"), "it is --num_workers here"),
    **dict.fromkeys(("api_base", "url", "host"), "it is --base_url here"),
    "retry": "it is --max_retries here",
    "timeout": "it is --connect_timeout_s, --read_timeout_s and --deadline_s here",
}
"""Names that no list of similar words would lead from."""


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def names(text: str) -> list[str]:
    """The comma-separated words of a flag."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _urls(text: str) -> list[str]:
    return [text] if text.startswith(SIMULATED) else names(text)  # the simulator's script has commas of its own


class ChatOptions(argparse.Namespace):
    """Our flags, as parsed. No flag holds a secret.

    They are kept apart from Beam's PipelineOptions: those travel to every worker, whose SDK would warn at start-up
    about each flag that it does not know, and nothing there reads ours.
    """

    input: list[str] | None
    output: str | None
    input_format: str | None
    output_format: str | None
    output_file_type: str
    ordered: bool
    prompt: str | None
    system_prompt: str | None
    image_column: list[str] | None
    messages_column: str | None
    base_url: list[str] | None
    model: str | None
    api_key_env: str
    api_key_secret: str | None
    dialect: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    max_tokens: int | None
    enable_thinking: bool | None
    extra_body: dict[str, Any] | None
    max_in_flight: int
    max_in_flight_mb: float
    requests_per_minute: float | None
    tokens_per_minute: float | None
    max_retries: int
    max_backoff_s: float
    connect_timeout_s: float
    read_timeout_s: float
    deadline_s: float | None
    image_max_pixels: int | None
    image_max_side: int | None
    image_min_side: int | None
    image_max_bytes: int | None
    image_format: str
    image_quality: int
    image_root: str | None
    image_cache_mb: float
    fetch_images: bool
    allow_private_addresses: bool
    fail_on: list[str] | None
    response_store: str
    store_namespace: str
    stored_finish_reasons: list[str] | None
    limit: int | None
    validate_only: bool
    max_failed_ratio: float


def parse_flags(argv: list[str]) -> tuple[ChatOptions, PipelineOptions]:
    """Our flags and Beam's.

    Raises:
        ConfigError: A flag that nobody knows, a word that is no flag, or a value of the wrong kind; names it and
            suggests the flag that was meant.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.run",
        description="Sends chat-completion requests from files to OpenAI-compatible endpoints.",
        epilog="Every option of Beam and its runners may be given too: --runner, --num_workers, --project, …",
        allow_abbrev=False,
        exit_on_error=False,
    )
    for add in (_add_files, _add_rows, _add_endpoint, _add_sampling, _add_limits, _add_images, _add_run):
        add(parser.add_argument)
    try:
        ours, rest = parser.parse_known_args(argv, namespace=ChatOptions())
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from error
    beams, unknown = PipelineOptions(rest), []
    known = set(re.findall(r"--\w+", parser.format_usage()))

    def look(beam_parser: argparse.ArgumentParser) -> None:
        beam_parser.exit_on_error = False  # it would print all 150 of its flags before the one error
        unknown.extend(beam_parser.parse_known_args(rest)[1])
        known.update(re.findall(r"--\w+", beam_parser.format_usage()))

    logging.disable(logging.WARNING)  # Beam would also log every unknown flag as "discarded"
    try:
        beams.get_all_options(add_extra_args_fn=look)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from error
    finally:
        logging.disable(logging.NOTSET)
    if unknown:
        raise ConfigError(_unknown_flag(unknown[0], known))
    return ours, beams


def _unknown_flag(word: str, known: set[str]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is not a flag: flags are written --name=value"
    flag = word.split("=", 1)[0]
    name = "--" + flag.lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(name, sorted(known | {f"--{other}" for other in _ELSEWHERE}), n=1)
    if near and (meant := _ELSEWHERE.get(near[0].removeprefix("--"))):
        return f"unknown flag {flag}: {meant}"
    return f"unknown flag {flag}: " + (f"did you mean {near[0]}?" if near else "--help shows every flag")


def _add_files(add: Callable[..., Any]) -> None:
    add(
        "--input",
        type=names,
        metavar="PATTERN[,PATTERN]",
        help="files to read, local or gs://: JSONL, CSV (both .gz too), Parquet",
    )
    add("--output", metavar="FOLDER", help="gets completed-*, failed-* and summary.json; local or gs://")
    add("--input_format", choices=["openai_batch", "rows"], help="default: by the first line")
    add("--output_format", choices=["openai_batch", "rows"], help="default: as the input")
    add("--output_file_type", default="jsonl", choices=["jsonl", "parquet"], help="(jsonl); parquet keeps types")
    add("--ordered", action="store_true", help="shards whose names and lines, in order, follow the input")


def _add_rows(add: Callable[..., Any]) -> None:
    add("--prompt", metavar="TEXT", help="prompt for `rows` input; {column} is replaced by the row's value")
    add("--system_prompt", metavar="TEXT", help="put in front of messages that do not begin with a system message")
    add("--image_column", action="append", metavar="NAME", help="column with a picture or a list of them; repeatable")
    add("--messages_column", metavar="NAME", help="column with messages; default: `messages`, else `prompt`")


def _add_endpoint(add: Callable[..., Any]) -> None:
    add(
        "--base_url",
        type=_urls,
        metavar="URL[,URL]",
        help="endpoints; default: $OPENAI_BASE_URL, $OPENAI_API_BASE; `simulated` starts the simulator",
    )
    add("--model", help="model of requests that name none")
    add("--api_key_env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key (OPENAI_API_KEY)")
    add("--api_key_secret", metavar="NAME", help="in Secret Manager: projects/P/secrets/S/versions/V")
    add(
        "--dialect", default="generic", choices=[d.value for d in Dialect], help="whose body fields are meant (generic)"
    )


def _add_sampling(add: Callable[..., Any]) -> None:
    for name, kind in (
        ("temperature", float),
        ("top_p", float),
        ("top_k", int),
        ("min_p", float),
        ("presence_penalty", float),
        ("repetition_penalty", float),
        ("max_tokens", int),
    ):
        add(f"--{name}", type=kind, metavar="N", help="default of the requests; not sent unless set")
    add("--enable_thinking", type=_boolean, metavar="BOOL", help="chat_template_kwargs.enable_thinking")
    add("--extra_body", type=_object, metavar="JSON", help="other body fields, as a JSON object")


def _add_limits(add: Callable[..., Any]) -> None:
    add("--max_in_flight", type=int, default=1024, metavar="N", help="open requests per worker process (1024)")
    add("--max_in_flight_mb", type=float, default=128, metavar="MB", help="bodies not yet sent, per process (128)")
    add("--requests_per_minute", type=float, metavar="N", help="for the whole local run; per process elsewhere")
    add("--tokens_per_minute", type=float, metavar="N", help="the same for tokens of prompts and answers")
    add("--max_retries", type=int, default=10, metavar="N", help="resends after the first try (10)")
    add("--max_backoff_s", type=float, default=60, metavar="S", help="longest backoff between tries (60)")
    add("--connect_timeout_s", type=float, default=30, metavar="S", help="to open a connection (30)")
    add("--read_timeout_s", type=float, default=1800, metavar="S", help="longest silence of a server (1800)")
    add("--deadline_s", type=float, metavar="S", help="for one request over all its tries (none)")


def _add_images(add: Callable[..., Any]) -> None:
    add("--image_max_pixels", type=int, metavar="N", help="larger pictures are made smaller")
    add("--image_max_side", type=int, metavar="PX", help="longer side; larger pictures are made smaller")
    add("--image_min_side", type=int, metavar="PX", help="shorter side; smaller pictures are scaled up")
    add("--image_max_bytes", type=int, metavar="N", help="of a picture's file, before base64")
    add("--image_format", default="auto", choices=["auto", "jpeg", "png"], help="what pictures are sent as (auto)")
    add("--image_quality", type=int, default=90, metavar="N", help="of JPEGs that are made, 1 to 100 (90)")
    add("--image_root", metavar="FOLDER", help="pictures are read from inside this folder only")
    add("--image_cache_mb", type=float, default=32, metavar="MB", help="encoded pictures kept, per process (32)")
    add("--fetch_images", action="store_true", help="download http(s) pictures here instead of passing the URL on")
    add("--allow_private_addresses", action="store_true", help="download from private and loopback addresses too")


def _add_run(add: Callable[..., Any]) -> None:
    add(
        "--response_store",
        default="auto",
        metavar="URL",
        help="finished answers are kept there, so that a rerun asks only what is missing: sqlite:///file.db, "
        "redis://…, gs://bucket/prefix/ or none; auto (default): in the output folder",
    )
    add(
        "--stored_finish_reasons",
        type=names,
        metavar="NAME[,NAME]",
        help="answers with these are kept in the store (stop,tool_calls)",
    )
    add("--store_namespace", default="", metavar="TEXT", help="part of the store's key; keeps jobs apart")
    add(
        "--fail_on",
        type=names,
        metavar="KIND[,KIND]",
        help="answers that count as failed: truncated, refused, filtered",
    )
    add("--limit", type=int, metavar="N", help="only the first N rows")
    add("--validate_only", action="store_true", help="read, build, encode and check everything, send nothing")
    add(
        "--max_failed_ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="more failed rows than this: exit code 3 (0); 1 also goes on when the first requests all fail alike",
    )
