"""The URL that each form of base URL stands for, and the choice among several endpoints."""

from __future__ import annotations

import pytest

from beam_llm.endpoints import EndpointPool, check_base_url, request_url
from beam_llm.errors import ConfigError

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h", "http://h/v1/chat/completions"),
        ("http://h/", "http://h/v1/chat/completions"),
        ("http://h//", "http://h/v1/chat/completions"),
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("http://h/v1/", "http://h/v1/chat/completions"),
        ("http://h/v1//", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions/", "http://h/v1/chat/completions"),
        ("http://h/v1beta/openai/", "http://h/v1beta/openai/chat/completions"),
        ("http://h/api/v1/", "http://h/api/v1/chat/completions"),
        ("http://h/api/v3", "http://h/api/v3/chat/completions"),
        ("https://h/openai/deployments/d?api-version=x", "https://h/openai/deployments/d/chat/completions?api-version=x"),
        ("https://h/d/chat/completions?api-version=x", "https://h/d/chat/completions?api-version=x"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/chat/completions"),
        ("http://h/a%2Fb", "http://h/a%2Fb/chat/completions"),
    ],
)  # fmt: skip
def test_each_form_of_base_url_means_one_url(base_url: str, url: str) -> None:
    """C41: no double slash, no second /v1, nothing added behind a path that the user gave but the route."""
    assert request_url(base_url, CHAT) == url


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/v1/chat/completions", "http://h/v1/chat/completions"),
        ("v1/chat/completions", "http://h/v1/chat/completions"),
        ("/chat/completions", "http://h/v1/chat/completions"),
        ("/v1/completions", "http://h/v1/completions"),
    ],
)
def test_each_form_of_path_means_one_url(path: str, url: str) -> None:
    assert request_url("http://h/v1", path) == url
    assert request_url("http://h", path) == url


@pytest.mark.parametrize(
    ("given", "checked"),
    [(" http://h/v1\n", "http://h/v1"), ("https://h", "https://h"), ("HTTP://h", "HTTP://h")],
)
def test_a_usable_base_url_loses_its_outer_white_space_only(given: str, checked: str) -> None:
    assert check_base_url(given) == checked


@pytest.mark.parametrize(
    "base_url", ["", "localhost:8000", "h/v1", "ftp://h", "http://", "http:///v1", "http://:80", "http://[::1", "http://h:x/"]
)  # fmt: skip
def test_what_is_no_address_is_refused_with_an_example(base_url: str) -> None:
    with pytest.raises(ConfigError, match=r"must be an http\(s\) URL such as http://localhost:8000/v1"):
        check_base_url(base_url)


@pytest.mark.parametrize("base_url", ["http://user:sk-canary@h:1/v1", "https://sk-canary@h", "ftp://u:sk-canary@h"])
def test_a_key_in_the_base_url_is_refused_without_showing_it(base_url: str) -> None:
    """C88: the message names the host and the remedy, not the key."""
    with pytest.raises(ConfigError, match="api_key_env") as caught:
        check_base_url(base_url)
    assert "canary" not in str(caught.value)
    assert "…@h" in str(caught.value)


def test_equals_take_turns() -> None:
    pool = EndpointPool(["http://a", "http://b", "http://c"])
    taken = [pool.take() for _ in range(6)]
    assert [endpoint.base_url for endpoint in taken] == ["http://a", "http://b", "http://c"] * 2


def test_one_after_the_other_uses_every_endpoint() -> None:
    pool = EndpointPool(["http://a", "http://b"])
    seen = []
    for _ in range(4):
        endpoint = pool.take()
        seen.append(endpoint.base_url)
        pool.release(endpoint)
    assert seen == ["http://a", "http://b"] * 2


def test_the_endpoint_with_the_fewest_open_requests_is_next() -> None:
    pool = EndpointPool(["http://a", "http://b"])
    taken = [pool.take() for _ in range(6)]
    for endpoint in taken:
        if endpoint.base_url == "http://b":
            pool.release(endpoint)
    assert [pool.take().base_url for _ in range(3)] == ["http://b"] * 3
    assert sorted(endpoint.in_flight for endpoint in pool.endpoints) == [3, 3]


def test_a_single_endpoint_is_always_taken() -> None:
    pool = EndpointPool(["http://a"])
    assert {pool.take().base_url for _ in range(3)} == {"http://a"}
    assert pool.endpoints[0].in_flight == 3


def test_an_endpoint_knows_its_urls() -> None:
    endpoint = EndpointPool(["http://a/v1/"]).endpoints[0]
    assert endpoint.url(CHAT) == endpoint.url(CHAT) == "http://a/v1/chat/completions"
    assert endpoint.url("/v1/completions") == "http://a/v1/completions"
