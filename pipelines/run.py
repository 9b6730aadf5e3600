"""python -m pipelines.run: rows in, one record out for each.

Flags -> config, the pipeline, its progress, its summary, its exit code. Nothing here is needed by a worker.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import apache_beam as beam
import orjson
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm.api_key import read_api_key
from beam_llm.config import ChatConfig
from beam_llm.errors import BeamLLMError, ConfigError
from beam_llm.files import FileType, InputError, match_files
from beam_llm.flags import SIMULATED, ChatOptions, parse_flags
from beam_llm.io import Format, InputFormat, ReadRequests, WriteResults
from beam_llm.local_run import MainThreadStop, let_workers_import_us, reason_of, shorten_worker_logs
from beam_llm.options import base_urls, chat_config, check_image_root, output_format, row_columns
from beam_llm.preview import Preview
from beam_llm.process_limits import allow_connections
from beam_llm.progress import ProgressReceiver
from beam_llm.progress_bar import ProgressBar
from beam_llm.result_folder import INVALID, SUMMARY, VALIDATION, StaleResults, check_output, job_of, refuse_loss
from beam_llm.runner import settle_runner
from beam_llm.simulator import Script, SimulatorProcess
from beam_llm.stores import try_store
from beam_llm.summary import EXIT_FAILED, EXIT_USAGE, Summary, summarise
from beam_llm.transforms import ChatCompletion, ValidateRequests


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that is settled before the pipeline is built."""

    options: PipelineOptions
    chat: ChatOptions
    processes: int | None
    patterns: list[str]
    output: str
    files: list[tuple[str, int]]
    input_format: InputFormat
    output_format: Format
    given: pa.Schema | None
    """Columns of the input, for Parquet results; None: JSONL."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pipeline that the flags describe.

    Args:
        argv: Flags; None = those of the command line.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 usage, 3 done with more failures than allowed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    shorten_worker_logs()
    try:
        run = _settle(list(sys.argv[1:] if argv is None else argv))
        with ExitStack() as stack:
            urls = _endpoints(run.chat, stack)
            config = chat_config(run.chat, urls, run.processes)
            _check(config, run)
            return _execute(run, config)
    except (ConfigError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BeamLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again", file=sys.stderr)
        return EXIT_FAILED


def _settle(argv: list[str]) -> _Run:
    chat, options = parse_flags(argv)
    processes = settle_runner(options)
    if not chat.input or not chat.output:
        raise ConfigError(f"--{'output' if chat.input else 'input'} is missing; --help shows every flag")
    if chat.limit is not None and chat.limit < 1:
        raise ConfigError(f"limit must be 1 or more, got {chat.limit}")
    if not 0 <= chat.max_failed_ratio <= 1:
        raise ConfigError(f"max_failed_ratio must be between 0 and 1, got {chat.max_failed_ratio}")
    files = match_files(chat.input)
    columns, preview = row_columns(chat), Preview(files)
    input_format = preview.format(Format(chat.input_format) if chat.input_format else None)
    if input_format is Format.ROWS:
        preview.check_columns(columns)
    given = preview.columns() if chat.output_file_type == FileType.PARQUET else None
    return _Run(
        options=options,
        chat=chat,
        processes=processes,
        patterns=chat.input,
        output=chat.output,
        files=files,
        input_format=InputFormat(input_format, columns),
        output_format=output_format(chat, input_format),
        given=given,
    )


def _endpoints(chat: ChatOptions, stack: ExitStack) -> tuple[str, ...]:
    """The base URLs, with `simulated?…` replaced by a simulator that runs as long as the stack."""
    if chat.validate_only and not chat.base_url:
        return ("http://localhost/v1",)
    urls = base_urls(chat)
    if not urls[0].startswith(SIMULATED):
        return urls
    chat.model = chat.model or SIMULATED
    simulator = stack.enter_context(SimulatorProcess(Script.from_query(urls[0].partition("?")[2])))
    return (simulator.base_url,)


def _check(config: ChatConfig, run: _Run) -> None:
    """What every worker would run into, found before the first of them starts."""
    if run.processes is not None:
        check_image_root(config.images.root)
    if run.processes is not None and not run.chat.validate_only:
        read_api_key(config.api_key_env, config.api_key_secret)
        allow_connections(config.max_in_flight)
    check_output(run.output)
    if not run.chat.validate_only:
        refuse_loss(run.output, (path for path, _ in run.files), job_of(run.patterns, run.chat.limit))
    if run.processes is not None and config.response_store is not None:
        asyncio.run(try_store(config.response_store))


def _execute(run: _Run, config: ChatConfig) -> int:
    let_workers_import_us()
    started = time.monotonic()
    try:
        with MainThreadStop() as main_thread, _progress(run, main_thread) as receiver:
            total_bytes = sum(size for _, size in run.files)
            with ProgressBar(receiver.totals, total_bytes, run.chat.limit):
                stale = StaleResults(run.output)
                result = build_pipeline(run, config).run()
                result.wait_until_finish()
    except (BeamLLMError, RuntimeError) as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return EXIT_FAILED
    summary = summarise(result, time.monotonic() - started, validated=run.chat.validate_only)
    code = summary.exit_code(run.chat.max_failed_ratio)
    if not run.chat.validate_only and code != EXIT_FAILED:
        stale.remove()
    _conclude(run, summary, code)
    return code


def _progress(run: _Run, main_thread: MainThreadStop) -> ProgressReceiver:
    all_may_fail = run.chat.max_failed_ratio >= 1
    return ProgressReceiver(main_thread.stop_run, None if all_may_fail else main_thread.stop_run)


def build_pipeline(run: _Run, config: ChatConfig) -> beam.Pipeline:
    """Read, ask, write."""
    pipeline = beam.Pipeline(options=run.options)
    requests = pipeline | "ReadRequests" >> ReadRequests(run.patterns, run.input_format, run.chat.limit)
    ask = ValidateRequests(config) if run.chat.validate_only else ChatCompletion(config)
    write = WriteResults(
        run.output,
        run.output_format,
        given=run.given,
        ordered=run.chat.ordered,
        failed_name=INVALID if run.chat.validate_only else "failed",
        completed=not run.chat.validate_only,
    )
    _ = requests | "ChatCompletion" >> ask | "WriteResults" >> write
    return pipeline


def _conclude(run: _Run, summary: Summary, code: int) -> None:
    path = FileSystems.join(run.output, VALIDATION if run.chat.validate_only else SUMMARY)
    found = {**summary.as_dict(), "exit_code": code, **job_of(run.patterns, run.chat.limit)}
    with FileSystems.create(path, "application/json") as file:
        file.write(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    for line in summary.failure_lines():
        print(f"error: {line}" if code else line, file=sys.stderr)
    print(f"results in {run.output}", file=sys.stderr)
    print(summary.line(), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
