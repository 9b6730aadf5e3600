"""ChatConfig: what it refuses, what it becomes elsewhere, and the key that is never part of it."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from beam_llm.api_key import read_api_key
from beam_llm.config import ChatConfig
from beam_llm.errors import ConfigError
from beam_llm.sampling import Dialect, SamplingParams

URL = "http://localhost:8000/v1"


def config(**settings: Any) -> ChatConfig:
    return ChatConfig(**{"base_urls": (URL,), **settings})


@pytest.mark.parametrize("base_urls", [URL, (URL,), [URL], f" {URL}\n"])
def test_base_urls_take_one_or_several(base_urls: Any) -> None:
    assert config(base_urls=base_urls).base_urls == (URL,)


@pytest.mark.parametrize("dialect", ["vllm", Dialect.VLLM])
def test_dialect_may_be_named(dialect: Any) -> None:
    assert config(dialect=dialect).dialect is Dialect.VLLM


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"base_urls": ()}, "base_urls is empty"),
        ({"base_urls": (URL, "localhost")}, "base_url must be an http"),
        ({"dialect": "openay"}, "dialect must be one of generic, openai, vllm, sglang, got 'openay'"),
        ({"max_in_flight": 0}, "max_in_flight must be 1 or more, got 0"),
        ({"batch_size": -1}, "batch_size must be 1 or more, got -1"),
        ({"max_in_flight_mb": 0}, "max_in_flight_mb must be a finite number above 0, got 0"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be a finite number above 0, got 0"),
        ({"read_timeout_s": -1}, "read_timeout_s must be a finite number above 0, got -1"),
        ({"requests_per_minute": 0}, "requests_per_minute must be a finite number above 0, got 0"),
        ({"tokens_per_minute": -5}, "tokens_per_minute must be a finite number above 0, got -5"),
        ({"deadline_s": math.nan}, "deadline_s must be a finite number above 0, got nan"),
        ({"dialect": "openai", "sampling": SamplingParams(top_k=5)}, "top_k=5 does not go with dialect openai"),
        ({"dialect": "openai", "sampling": SamplingParams(enable_thinking=False)}, "chat_template_kwargs="),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fail_on": "truncated"}, "fail_on must be a tuple of strings, got 'truncated': write ('truncated',)"),
        ({"fail_on": (1,)}, "fail_on must be a tuple of strings, got (1,); leave it out for the default, ()"),
        ({"base_urls": None}, "base_urls must be a tuple of strings, got None"),
        ({"base_urls": [5]}, "base_urls must be a tuple of strings, got [5]"),
        ({"max_in_flight": 1.5}, "max_in_flight must be a whole number, got 1.5; leave it out for the default, 1024"),
        ({"batch_size": True}, "batch_size must be a whole number, got True; leave it out for the default, "),
        ({"deadline_s": "5"}, "deadline_s must be a number or None, got '5'; leave it out for the default, None"),
        ({"read_timeout_s": True}, "read_timeout_s must be a number, got True; leave it out for the default, 1800"),
        ({"images": "auto"}, "images must be of type ImagePolicy, got 'auto'"),
        ({"sampling": {"top_p": 1}}, "sampling must be of type SamplingParams, got {'top_p': 1}"),
        ({"system_prompt": b"x"}, "system_prompt must be a string or None, got b'x'"),
        ({"model": ["sk-canary-123"]}, "model must be a string or None, got ['sk-***']"),
        ({"read_timeout_s": math.inf}, "read_timeout_s must be a finite number above 0, got inf"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert str(caught.value).startswith(reason)


def test_whole_numbers_do_for_numbers_and_lists_for_tuples() -> None:
    given = config(fail_on=["truncated"], stored_finish_reasons=["stop"], read_timeout_s=5, deadline_s=None)
    assert (given.fail_on, given.stored_finish_reasons) == (("truncated",), ("stop",))
    assert given.key() == config(fail_on=("truncated",), stored_finish_reasons=("stop",), read_timeout_s=5).key()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        config().max_in_flight = 5  # type: ignore[misc]


def test_megabytes_become_bytes() -> None:
    assert config(max_in_flight_mb=0.5).max_in_flight_bytes == 512 * 1024


RICH = {"model": "m", "system_prompt": "m", "sampling": SamplingParams(top_p=0.5, extra_body={"m": ["m", {"a": 1}]})}


def test_a_worker_gets_an_equal_config_with_the_same_key() -> None:
    given = config(**RICH)
    received = pickle.loads(pickle.dumps(given))  # noqa: S301
    assert received == given
    assert received.key() == given.key()


def test_key_is_the_same_in_every_process() -> None:
    code = (
        "from beam_llm.config import ChatConfig, SamplingParams; "
        "print(ChatConfig(('http://localhost:8000/v1',), 'm', system_prompt=''.join(['m']), "
        "sampling=SamplingParams(top_p=0.5, extra_body={'m': ['m', {'a': 1}]})).key())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {config(**RICH).key()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "ab", "system_prompt": "ab"}, {"model": "ab", "system_prompt": "".join(["a", "b"])}),
        (
            {"sampling": SamplingParams(extra_body={"a": 1, "b": 2})},
            {"sampling": SamplingParams(extra_body={"b": 2, "a": 1})},
        ),
    ],
)
def test_equal_configs_have_one_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert config(**one) == config(**other)
    assert config(**one).key() == config(**other).key()


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "m"},
        {"base_urls": ("http://localhost:8001/v1",)},
        {"max_in_flight": 7},
        {"sampling": SamplingParams(temperature=0)},
        {"dialect": "vllm"},
    ],
)
def test_different_configs_have_different_keys(settings: dict[str, Any]) -> None:
    assert config(**settings).key() != config().key()


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("sk-test", "sk-test"),
        ("sk-test\n", "sk-test"),
        ("sk-test\r\n", "sk-test"),
        (" sk-test\t", "sk-test"),
        ("sk-é", "sk-é"),
        ("", None),
        (" \n", None),
    ],
)
def test_white_space_around_the_key_is_cut_off(monkeypatch: pytest.MonkeyPatch, value: str, key: str | None) -> None:
    """C38: a secret stored with a line end works."""
    monkeypatch.setenv("SOME_KEY", value)
    assert read_api_key("SOME_KEY") == key


@pytest.mark.parametrize(
    "value", ["sk-canary\nst", "sk-canary\rst", "sk-canary\x7fst", "sk-canary\x85st", "sk-canary-ł"]
)
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """C38, C88: refused by the name of its variable, before any row is read."""
    monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(ConfigError, match=r"\$SOME_KEY") as caught:
        read_api_key("SOME_KEY")
    assert "canary" not in str(caught.value)


def test_no_variable_means_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert read_api_key("SOME_KEY") is None
    assert read_api_key(None) is None


def test_the_key_is_not_part_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """C88: what Beam stores, logs and sends to workers holds the name of the variable only."""
    monkeypatch.setenv("SOME_KEY", "sk-canary")
    given = config(api_key_env="SOME_KEY")
    assert "canary" not in repr(given)
    assert b"canary" not in pickle.dumps(given)


def test_a_stream_for_every_request_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="stream"):
        ChatConfig(base_urls=("http://h",), sampling=SamplingParams(extra_body={"stream": True}))


@pytest.mark.parametrize("reference", ["projects/p/secrets/s/versions/1", "type:GcpSecret;name:s", "type:Nope;x:y"])
def test_a_secret_that_cannot_be_read_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch, reference: str) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-variable")
    with pytest.raises(ConfigError, match="api_key_secret=") as refused:
        read_api_key("OPENAI_API_KEY", reference)
    assert reference in str(refused.value)
