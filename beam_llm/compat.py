"""MPOpenAIAPI: the constructor and the calls of a multi-process API class, on Beam's local runner."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from beam_llm.body import BodyBuilder
from beam_llm.config import ChatConfig
from beam_llm.endpoints import check_base_url
from beam_llm.errors import ConfigError, RunStoppedError
from beam_llm.failure_examples import prompt_failures
from beam_llm.held_driver import HeldDriver
from beam_llm.jsontext import object_in
from beam_llm.metrics import REQUESTS, RETRIES
from beam_llm.process_limits import most_connections
from beam_llm.records import ChatRequest, Completion, FailedRequest, Outcome
from beam_llm.retry import RetryPolicy
from beam_llm.sampling import SamplingParams
from beam_llm.spool import Spool, spool_prompts
from beam_llm.spooled_job import run_spooled_job
from beam_llm.summary import Summary

FAIL_MSG = "Failed to obtain answer via API."
"""Stands for an answer that could not be had."""

_BASE_ENV = ("OPENAI_API_BASE", "OPENAI_BASE_URL")
_WORKERS = min(os.cpu_count() or 1, 8)
_ONE_PROCESS_PROMPTS = 256
"""Fewer prompts than this are sent from this process: worker processes take seconds to start."""

_MAX_BACKOFF_S = 60.0


class MPOpenAIAPI:
    """Asks an OpenAI-compatible server many prompts and returns the answers as a list, in their order.

    Prompts and answers are a list of the caller's; on the way they are in a temporary folder (in `TMPDIR`), pictures
    in memory as raw pixels, so that no worker process holds more than what it has in flight.

    A context manager; `shutdown` ends it. `generate_inner` may be called from many threads at once.

    Args:
        model: Its name on the server.
        key: API key; None takes it from `OPENAI_API_KEY`, "" sends none.
        api_base: Base URL; None takes it from `OPENAI_API_BASE`, or else `OPENAI_BASE_URL`.
        port: Makes the URL `{api_base}:{port}/v1/chat/completions`.
        retry: Resends of one request after its first try.
        wait: Seconds of the first backoff at most; it doubles up to a minute, or `wait` if that is more.
        timeout: (connect, read) in seconds; read is the longest silence. One number is both.
        temperature, top_p, top_k, min_p, presence_penalty, repetition_penalty, max_tokens: Sent with every request;
            None leaves one out.
        thread_num: Open requests in total, shared out evenly among the workers.
        return_dict: Whether answers are JSON objects, returned as dicts. One without an object in it has failed.
        max_connections: Most connections of one worker; None = as many as it has open requests.
        num_workers: Worker processes of a large job; 1 never starts any.
        worker_concurrency: Open requests of one worker, instead of its share of `thread_num`.
        enable_thinking: Sent as `chat_template_kwargs.enable_thinking`; None leaves it out.
        fail_msg: Stands in the list for an answer that could not be had.
        verbose: Whether progress, why prompts failed and a summary are written to standard error.
        kwargs: More fields of the body.

    Attributes:
        succeeded, failed: Counts of the last `generate`.
        failures: Why, by the prompt's index, for the same.

    Raises:
        ConfigError: A setting that cannot work; names it, and the way out.
    """

    def __init__(
        self,
        model: str,
        key: str | None = None,
        api_base: str | None = None,
        port: int | str | None = None,
        retry: int = 10,
        wait: float = 3,
        timeout: float | tuple[float, float] = (30, 1800),
        temperature: float | None = 0.6,
        top_p: float | None = 0.95,
        top_k: int | None = 20,
        min_p: float | None = 0.0,
        presence_penalty: float | None = 1.0,
        repetition_penalty: float | None = 1.0,
        max_tokens: int | None = 16384,
        thread_num: int = 8192,
        return_dict: bool = False,
        max_connections: int | None = None,
        num_workers: int = _WORKERS,
        worker_concurrency: int | None = None,
        enable_thinking: bool | None = False,
        *,
        fail_msg: str = FAIL_MSG,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be 1 or more, got {num_workers}")
        self.num_workers = num_workers
        self.return_dict = return_dict
        self.fail_msg = fail_msg
        self.verbose = verbose
        self.succeeded = self.failed = 0
        self.failures: dict[int, str] = {}
        self._limits = thread_num, worker_concurrency, max_connections
        self._held = HeldDriver(key)
        self._finalizer = weakref.finalize(self, self._held.release)
        connect_s, read_s = timeout if isinstance(timeout, (tuple, list)) else (timeout, timeout)
        self._config = ChatConfig(
            base_urls=(base_url(api_base, port),),
            model=model,
            api_key_env=None if key == "" else self._held.key_env,
            sampling=SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                presence_penalty=presence_penalty,
                repetition_penalty=repetition_penalty,
                max_tokens=max_tokens,
                enable_thinking=enable_thinking,
                extra_body=kwargs,
            ),
            retry=RetryPolicy(retry, initial_backoff_s=wait, max_backoff_s=max(wait, _MAX_BACKOFF_S)),
            max_in_flight=open_requests(*self._limits, workers=1),
            connect_timeout_s=connect_s,
            read_timeout_s=read_s,
        )
        self._builder = BodyBuilder(self._config)

    def generate(self, messages: Iterable[Any]) -> list[Any]:
        """Asks every prompt.

        Args:
            messages: The prompts, each in any form: OpenAI messages, a list of `{"type", "value"}` parts with paths,
                URLs, bytes or PIL images, a string.

        Returns:
            For each prompt, in their order, the answer's text (a dict with `return_dict`), or `fail_msg`.

        Raises:
            RunStoppedError: Nothing will be answered (bad key, unknown model, server not there); one line says why.
        """
        if isinstance(messages, (str, bytes, Mapping)):
            raise TypeError("messages must be a list of prompts; put a single prompt into a list")
        self._check_open()
        with TemporaryDirectory(prefix="beam_llm-", ignore_cleanup_errors=True) as folder:
            spool = spool_prompts(messages, Path(folder))
            summary = self._run(spool)
            answers = self._collect(spool)
        if self.verbose:
            for line in (*prompt_failures(self.failures), self._summary_line(summary)):
                sys.stderr.write(f"beam_llm: {line}\n")
        return answers

    def generate_inner(self, one: Any) -> tuple[int, Any, Any]:
        """Asks one prompt, from this process.

        Args:
            one: The prompt, as in `generate`.

        Returns:
            (0, answer, response body), or (-1, `fail_msg`, why). An answer without the JSON object that `return_dict`
            asks for is (-1, `fail_msg`, response body).
        """
        self._check_open()
        try:
            outcome = self._ask(ChatRequest("generate_inner", {"messages": one}))
        except RunStoppedError as error:
            return -1, self.fail_msg, str(error)
        answer, reason = self._read(outcome)
        return (0 if reason is None else -1), answer, outcome.body if isinstance(outcome, Completion) else reason

    def shutdown(self) -> None:
        """Closes the connections and forgets the key. Safe to call twice; nothing can be asked afterwards."""
        self._finalizer()

    def __enter__(self) -> MPOpenAIAPI:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("shutdown() has been called: make a new MPOpenAIAPI")

    def _run(self, spool: Spool) -> Summary:
        if not spool.written:
            return Summary({}, 0.0)
        if spool.written < _ONE_PROCESS_PROMPTS or self.num_workers == 1:
            with self._held.driver(self._config):  # so that the connections outlast the job
                return run_spooled_job(spool, self._config, 1, show_progress=self.verbose)
        config = replace(self._config, max_in_flight=open_requests(*self._limits, workers=self.num_workers))
        return run_spooled_job(spool, config, self.num_workers, show_progress=self.verbose)

    def _ask(self, request: ChatRequest) -> Outcome:
        prepared = self._builder.prepare(request)
        if isinstance(prepared, FailedRequest):
            return prepared
        with self._held.driver(self._config) as driver:
            channel = driver.channel()
            try:
                channel.submit([(None, prepared)])
                while not (results := channel.wait(for_room=False)):
                    pass
            except BaseException:
                channel.abandon()
                raise
        return results[0][1]

    def _collect(self, spool: Spool) -> list[Any]:
        answers = [self.fail_msg] * spool.prompts
        failures = dict.fromkeys(range(spool.prompts), "internal: no record came back")
        failures.update((index, f"{error.kind}: {error.message}") for index, error in spool.refused.items())
        for index, outcome in spool.outcomes():
            answers[index], reason = self._read(outcome)
            if reason is None:
                failures.pop(index, None)
            else:
                failures[index] = reason
        self.failures = failures
        self.failed = len(failures)
        self.succeeded = spool.prompts - self.failed
        return answers

    def _read(self, outcome: Outcome) -> tuple[Any, str | None]:
        """The answer and None, or `fail_msg` and why there is none."""
        if isinstance(outcome, FailedRequest):
            return self.fail_msg, f"{outcome.kind}: {outcome.message}"
        text = outcome.answer
        if text is None:
            why = outcome.refusal or f"finish_reason {outcome.finish_reason}"
            return self.fail_msg, f"no_text: the answer has no text ({why})"
        if not self.return_dict:
            return text, None
        found = object_in(text)
        if found is None:
            return self.fail_msg, f"not_json: not one JSON object in {text[:200]!r}"
        return found, None

    def _summary_line(self, summary: Summary) -> str:
        kinds = Counter(reason.partition(":")[0] for reason in self.failures.values()).most_common()
        failed = f"{self.failed:,} failed" + "".join(f", {kind} {count:,}" for kind, count in kinds)
        return (
            f"{self.succeeded + self.failed:,} prompts: {self.succeeded:,} succeeded, {failed}; "
            f"{summary.count(REQUESTS):,} requests sent, {summary.count(RETRIES):,} retries; {summary.seconds:.1f} s"
        )


def base_url(api_base: str | None, port: int | str | None) -> str:
    """The base URL of the old class's two arguments.

    Raises:
        ConfigError: None given and none in the environment, or a port besides a path or another port.
    """
    url = api_base or next(filter(None, map(os.environ.get, _BASE_ENV)), None)
    if not url:
        raise ConfigError("no endpoint: give api_base='http://host' and port=8000, or set OPENAI_API_BASE")
    if port is None:
        return url
    parts = urlsplit(check_base_url(url))
    if parts.port is not None or parts.path.strip("/") or parts.query:
        raise ConfigError(f"port={port} goes with an api_base such as http://host, got {url!r}: leave port out")
    return f"{url.strip().rstrip('/')}:{port}"


def open_requests(thread_num: int, worker_concurrency: int | None, max_connections: int | None, *, workers: int) -> int:
    """Open requests of one worker: its share of `thread_num` or `worker_concurrency`, within the limits.

    Args:
        thread_num: In total, for all workers.
        worker_concurrency: For one worker, instead of its share; None = the share.
        max_connections: Most for one worker; None = what the limit of open files allows, which always holds.
        workers: Number of processes.

    Raises:
        ConfigError: A number below 1.
    """
    given = {"thread_num": thread_num, "worker_concurrency": worker_concurrency, "max_connections": max_connections}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    share = worker_concurrency or math.ceil(thread_num / workers)
    return min(limit for limit in (share, max_connections, most_connections()) if limit is not None)
