"""The command line's flags: what they become, which ones are refused, and what a local run is."""

from __future__ import annotations

import os
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions, StreamingOptions
from apache_beam.runners.portability.fn_api_runner.fn_runner import RunnerResult

from beam_llm.config import ChatConfig
from beam_llm.errors import ConfigError
from beam_llm.flags import ChatOptions, parse_flags
from beam_llm.options import base_urls, chat_config, row_columns
from beam_llm.runner import settle_runner
from beam_llm.sampling import Dialect

URLS = ("http://localhost:8000/v1",)


def ours(*flags: str) -> ChatOptions:
    return parse_flags(list(flags))[0]


def config(*flags: str, processes: int | None = None) -> ChatConfig:
    return chat_config(ours(*flags), URLS, processes)


def settled(*flags: str) -> tuple[int | None, PipelineOptions]:
    options = parse_flags(list(flags))[1]
    return settle_runner(options), options


def value(config: ChatConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_no_flags_mean_the_defaults_of_the_config() -> None:
    assert config() == ChatConfig(URLS)
    assert config().sampling.fields() == {}


@pytest.mark.parametrize(
    ("flag", "path", "expected"),
    [
        ("--model=m", "model", "m"),
        ("--api_key_env=SOME_KEY", "api_key_env", "SOME_KEY"),
        ("--dialect=vllm", "dialect", Dialect.VLLM),
        ("--system_prompt=be brief", "system_prompt", "be brief"),
        ("--temperature=0", "sampling.temperature", 0.0),
        ("--top_p=0.5", "sampling.top_p", 0.5),
        ("--top_k=-1", "sampling.top_k", -1),
        ("--min_p=0.1", "sampling.min_p", 0.1),
        ("--presence_penalty=-1.5", "sampling.presence_penalty", -1.5),
        ("--repetition_penalty=1.1", "sampling.repetition_penalty", 1.1),
        ("--max_tokens=9", "sampling.max_tokens", 9),
        ("--enable_thinking=false", "sampling.enable_thinking", False),
        ("--enable_thinking=True", "sampling.enable_thinking", True),
        ('--extra_body={"seed": 7}', "sampling.extra_body", {"seed": 7}),
        ("--max_in_flight=5", "max_in_flight", 5),
        ("--max_in_flight_mb=0.5", "max_in_flight_mb", 0.5),
        ("--requests_per_minute=90", "requests_per_minute", 90.0),
        ("--tokens_per_minute=9e6", "tokens_per_minute", 9e6),
        ("--max_retries=0", "retry.max_retries", 0),
        ("--max_backoff_s=0.1", "retry.max_backoff_s", 0.1),
        ("--connect_timeout_s=2", "connect_timeout_s", 2.0),
        ("--read_timeout_s=3", "read_timeout_s", 3.0),
        ("--deadline_s=4", "deadline_s", 4.0),
        ("--image_max_pixels=1000", "images.max_pixels", 1000),
        ("--image_max_side=100", "images.max_side", 100),
        ("--image_min_side=28", "images.min_side", 28),
        ("--image_max_bytes=5000", "images.max_bytes", 5000),
        ("--image_format=png", "images.format", "png"),
        ("--image_quality=70", "images.quality", 70),
        ("--image_root=/data", "images.root", "/data"),
        ("--fetch_images", "images.fetch_images", True),
    ],
)
def test_a_flag_reaches_its_setting(flag: str, path: str, expected: Any) -> None:
    assert value(config(flag), path) == expected


@pytest.mark.parametrize(("processes", "rate"), [(4, 25.0), (None, 100.0)])
def test_processes_of_a_local_run_share_the_rates(processes: int | None, rate: float) -> None:
    shared = config("--requests_per_minute=100", "--tokens_per_minute=100", processes=processes)
    assert (shared.requests_per_minute, shared.tokens_per_minute) == (rate, rate)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature=hot"], "--temperature"),
        (["--enable_thinking=maybe"], "expected true or false, got 'maybe'"),
        (["--extra_body=[1]"], "expected a JSON object, got '[1]'"),
        (["--extra_body={"], "expected a JSON object, got '{'"),
        (["--dialect=openay"], "--dialect"),
        (["--max_in_flihgt=5"], "--max_in_flight"),
        (["--api_key=sk-canary"], "--api_key_env"),
        (["--thread_num=8"], "--max_in_flight"),
        (["--retry=3"], "--max_retries"),
        (["--num_worker=3"], "--num_workers"),
        (["--max_in_fl=5"], "--max_in_flight"),
        (["stray_word"], "stray_word"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused_with_a_suggestion(flags: list[str], said: str) -> None:
    """C67: nothing that a user wrote is dropped without a word."""
    with pytest.raises(ConfigError) as caught:
        parse_flags(flags)
    assert said in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--temperature=-1", "temperature must be"),
        ("--max_in_flight=0", "max_in_flight must be"),
        ("--max_retries=-1", "max_retries must be"),
        ("--image_quality=0", "ImagePolicy.quality must be"),
        ("--deadline_s=0", "deadline_s must be"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_name(flag: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(flag)
    assert str(caught.value).startswith(reason)


def test_beams_flags_go_to_beam_and_ours_do_not() -> None:
    chat, options = parse_flags(["--input=a,b", "--runner=PrismRunner", "--model=m", "--job_name=j", "--limit=3"])
    assert (chat.input, chat.model, chat.limit) == (["a", "b"], "m", 3)
    beams = options.get_all_options(drop_default=True)
    assert (beams["runner"], beams["job_name"]) == ("PrismRunner", "j")
    assert not {"input", "model", "limit"} & set(beams)


@pytest.mark.parametrize(
    ("flags", "environment", "urls"),
    [
        (["--base_url=http://a, http://b"], {"OPENAI_BASE_URL": "http://c"}, ("http://a", "http://b")),
        ([], {"OPENAI_BASE_URL": "http://c,http://d", "OPENAI_API_BASE": "http://e"}, ("http://c", "http://d")),
        ([], {"OPENAI_BASE_URL": "", "OPENAI_API_BASE": "http://e"}, ("http://e",)),
        (["--base_url=simulated"], {}, ("simulated",)),
    ],
)
def test_endpoints_come_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], environment: dict[str, str], urls: tuple[str, ...]
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    assert base_urls(ours(*flags)) == urls


@pytest.mark.parametrize("setting", [None, ""])
def test_no_endpoint_at_all_is_refused_with_the_ways_out(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    if setting is not None:
        monkeypatch.setenv("OPENAI_BASE_URL", setting)
    with pytest.raises(ConfigError, match=r"--base_url=.*OPENAI_BASE_URL.*simulated"):
        base_urls(ours())


def test_columns_of_rows_come_from_their_flags() -> None:
    columns = row_columns(ours("--prompt={q}", "--image_column=a", "--image_column=b"))
    assert (columns.prompt, columns.image_columns, columns.messages_column) == ("{q}", ("a", "b"), None)
    assert row_columns(ours("--messages_column=m")).messages_column == "m"
    with pytest.raises(ConfigError, match="exclude each other"):
        row_columns(ours("--prompt={q}", "--messages_column=m"))


@pytest.mark.parametrize(
    "runner",
    [
        [],
        ["--runner=DirectRunner"],
        ["--runner=SwitchingDirectRunner"],
        ["--runner=directrunner"],
        ["--runner=direct"],
        ["--runner=apache_beam.runners.direct.direct_runner.DirectRunner"],
    ],
)
def test_a_local_run_has_the_worker_processes_asked_for(runner: list[str]) -> None:
    workers, options = settled(*runner, "--num_workers=3")
    direct = options.view_as(DirectOptions)
    assert (workers, direct.direct_num_workers, direct.direct_running_mode) == (3, 3, "multi_processing")


def test_a_local_run_takes_the_cores_there_are_up_to_eight() -> None:
    assert settled()[0] == min(os.cpu_count() or 1, 8)


@pytest.mark.parametrize("runner", ["PrismRunner", "FlinkRunner", "DataflowRunner", "PortableRunner"])
def test_other_runners_are_themselves(runner: str) -> None:
    workers, options = settled(f"--runner={runner}")
    assert workers is None
    assert options.view_as(StandardOptions).runner == runner
    assert "update_compatibility_version" not in options.get_all_options(drop_default=True)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--runner=apache_beam.runners.dask.dask_runner.DaskRunner", "loses elements"),
        ("--runner=DaskRunner", "loses elements"),
        ("--num_workers=0", "num_workers must be 1 or more, got 0"),
    ],
)
def test_a_run_that_would_lose_rows_or_have_no_workers_is_refused(flag: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settled(flag)


@pytest.mark.parametrize(
    ("flags", "version"), [([], beam.__version__), (["--update_compatibility_version=2.60.0"], "2.60.0")]
)
def test_a_local_run_keeps_prism_out_by_its_compatibility_version(flags: list[str], version: str) -> None:
    assert settled(*flags)[1].view_as(StreamingOptions).update_compatibility_version == version


def test_a_local_run_is_run_by_the_fn_api_runner() -> None:
    """Left alone, Beam would try Prism, which it downloads and which loses the number of workers."""
    workers, options = settled("--num_workers=1")
    assert workers == 1
    pipeline = beam.Pipeline(options=options)
    _ = pipeline | beam.Create([1])
    result = pipeline.run()
    result.wait_until_finish()
    assert isinstance(result, RunnerResult)
