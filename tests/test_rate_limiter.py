"""Rate limits as the runner sees them: the time they take, and Beam's own limiter against a real gRPC service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.io.components import rate_limit_pb2
from apache_beam.io.components.rate_limiter import EnvoyRateLimiter
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that
from apache_beam.testing.util import equal_to as these

from beam_llm import ChatCompletion, ChatConfig, ChatRequest
from beam_llm.runner import settle_runner
from tests.endpoint import ScriptedEndpoint, echo


class RateLimitService(grpc.GenericRpcHandler):
    """Refuses the first question of all, then allows everything; remembers how many hits were asked for."""

    def __init__(self) -> None:
        self.hits: list[int] = []

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            self._should_rate_limit,
            request_deserializer=rate_limit_pb2.RateLimitRequest.FromString,
            response_serializer=rate_limit_pb2.RateLimitResponse.SerializeToString,
        )

    def _should_rate_limit(self, request: Any, context: Any) -> Any:
        self.hits.append(request.hits_addend)
        if len(self.hits) > 1:
            return rate_limit_pb2.RateLimitResponse(overall_code=rate_limit_pb2.RateLimitResponse.OK)
        status = rate_limit_pb2.RateLimitResponse.DescriptorStatus(code=rate_limit_pb2.RateLimitResponse.OVER_LIMIT)
        status.duration_until_reset.FromMilliseconds(10)
        return rate_limit_pb2.RateLimitResponse(
            overall_code=rate_limit_pb2.RateLimitResponse.OVER_LIMIT, statuses=[status]
        )


@contextmanager
def serving(service: RateLimitService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def counters(result: Any) -> dict[str, int]:
    return {c.key.metric.name: c.result for c in result.metrics().query(MetricsFilter())["counters"]}


def test_time_held_back_by_the_configs_own_limits_is_reported_to_the_runner() -> None:
    """6 requests at 120 a minute, of which a second's worth may go at once: two seconds on hold."""
    options = PipelineOptions(["--num_workers=1"])
    settle_runner(options)
    with ScriptedEndpoint(echo) as endpoint:
        config = ChatConfig(base_urls=(endpoint.base_url,), model="m", requests_per_minute=120)
        pipeline = beam.Pipeline(options=options)
        requests = [ChatRequest(str(i), {"messages": str(i)}) for i in range(6)]
        _ = pipeline | beam.Create(requests, reshuffle=False) | ChatCompletion(config)
        result = pipeline.run()
        result.wait_until_finish()
    assert 1 <= counters(result)["cumulativeThrottlingSeconds"] <= 3


def test_one_limit_over_all_workers_is_asked_for_every_request_that_is_sent() -> None:
    service = RateLimitService()
    options = PipelineOptions(["--num_workers=1"])
    settle_runner(options)
    with ScriptedEndpoint(echo) as endpoint, serving(service) as address:
        limiter = EnvoyRateLimiter(address, "llm", [{"model": "m"}], namespace="limiter")
        config = ChatConfig(base_urls=(endpoint.base_url,), model="m", batch_size=10)
        pipeline = beam.Pipeline(options=options)
        requests = [ChatRequest(str(i), {"messages": str(i)}) for i in range(25)]
        results = pipeline | beam.Create(requests, reshuffle=False) | ChatCompletion(config, rate_limiter=limiter)
        assert_that(results.completed | beam.Map(lambda c: c.answer), these([str(i) for i in range(25)]))
        result = pipeline.run()
        result.wait_until_finish()
    assert service.hits == [10, 10, 10, 5]  # the first ten were refused once
    assert counters(result)["cumulativeThrottlingSeconds"] == 1
    assert len(endpoint.requests) == 25
