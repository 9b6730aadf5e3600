"""Scripts of the simulator: their one-line form, which prompts are doomed, and what an attempt gets."""

from __future__ import annotations

import random

import pytest

from beam_llm.errors import ConfigError
from beam_llm.simulator.script import FAULTS, LATENCY_CAP, Script, draw_latency_s, draw_verdict, is_doomed


def test_is_doomed_is_stable_and_follows_the_rate() -> None:
    prompts = [f"question {number}" for number in range(2000)]
    doomed = {prompt for prompt in prompts if is_doomed(prompt, 0.1)}
    assert 140 <= len(doomed) <= 260
    assert doomed < {prompt for prompt in prompts if is_doomed(prompt, 0.2)}
    assert not any(is_doomed(prompt, 0.0) for prompt in prompts)
    assert all(is_doomed(prompt, 1.0) for prompt in prompts)
    # Pinned, since tests in other processes and later versions count on the same rows.
    assert [number for number in range(30) if is_doomed(f"question {number}", 0.1)] == [7, 13, 24, 28]


def test_latency_is_lognormal_and_capped() -> None:
    rng = random.Random(3)
    assert draw_latency_s(250, 0, rng) == 0.25
    drawn = sorted(draw_latency_s(100, 0.7, rng) for _ in range(2001))
    assert 0.09 <= drawn[1000] <= 0.11
    assert max(draw_latency_s(100, 1000, rng) for _ in range(50)) == pytest.approx(0.1 * LATENCY_CAP)


def test_verdict_waits_unless_a_real_server_would_refuse_at_once() -> None:
    rng = random.Random(1)
    assert draw_verdict(Script(latency_ms=50), "x", 1, rng) == (0.05, 200, "")
    assert draw_verdict(Script(slow_rate=1, slow_ms=900), "x", 1, rng) == (0.9, 200, "")
    script = Script(latency_ms=50, error_rate=1, error_statuses=(429,))
    assert draw_verdict(script, "x", 1, rng) == (0.0, 429, "transient")
    script = Script(latency_ms=50, fail_rate=1, error_rate=1)
    assert draw_verdict(script, "x", 1, rng) == (0.05, 500, "permanent")


def test_script_survives_its_one_line_form() -> None:
    for script in (
        Script(),
        Script(latency_ms=1.5, error_rate=0.1, error_statuses=(503,), retry_after_s=0.0, strict_fields=True),
        Script(error_statuses=(503,), faults=("reset",), slow_ms=5),
        Script(fault_rate=1, faults=FAULTS, models=("a/b", "c d"), api_key="k&=%", hold_until=3, seed=9),
    ):
        assert Script.from_query(script.as_query()) == script
    parsed = Script.from_query("?latency_ms=200&error_rate=0.05&error_statuses=500,429&strict_fields=true")
    assert parsed == Script(latency_ms=200, error_rate=0.05, error_statuses=(500, 429), strict_fields=True)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("latencyms=200", ("'latencyms'", "'200'", "did you mean 'latency_ms'", "hold_until")),
        ("zzz=1", ("'zzz'", "known keys")),
        ("latency_ms=fast", ("latency_ms", "a number", "'fast'")),
        ("latency_ms", ("latency_ms", "a number", "''")),
        ("latency_ms=nan", ("latency_ms", "finite")),
        ("latency_ms=-1", ("latency_ms", "-1")),
        ("latency_ms=1&latency_ms=2", ("latency_ms", "twice")),
        ("error_rate=1.5", ("error_rate", "between 0 and 1", "1.5")),
        ("hold_until=2.5", ("hold_until", "whole number", "'2.5'")),
        ("strict_fields=maybe", ("strict_fields", "true or false", "'maybe'")),
        ("error_rate=1&error_statuses=500,x", ("error_statuses", "'500,x'")),
        ("error_rate=1&error_statuses=200", ("error_statuses", "200")),
        ("error_rate=1&error_statuses=", ("error_statuses", "empty")),
        ("fault_rate=1&faults=rest", ("'rest'", "did you mean 'reset'", "not_json")),
        ("faults=reset", ("faults", "does nothing", "fault_rate")),
        ("slow_ms=5", ("slow_ms", "slow_rate")),
        ("hold_until=5&max_open=4", ("hold_until=5", "max_open=4")),
    ],
)
def test_bad_script_line_says_what_is_wrong(query: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Script.from_query(query)
    assert [word for word in words if word not in str(caught.value)] == []
