"""What `--runner=DirectRunner` means: Beam's FnApiRunner, with a number of worker processes."""

from __future__ import annotations

import os

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    StreamingOptions,
    WorkerOptions,
)
from apache_beam.runners import create_runner

from beam_llm.errors import ConfigError

LOCAL_RUNNERS = ("DirectRunner", "SwitchingDirectRunner")
_MAX_LOCAL_WORKERS = 8

WORKER_START = "beam_llm.worker_start"
"""The module that a local worker process imports first."""


def settle_runner(options: PipelineOptions) -> int | None:
    """Makes `--runner=DirectRunner` mean Beam's FnApiRunner with worker processes.

    Left alone, Beam 2.77 would first try Prism, a Go program that it downloads and that ignores the number of workers.
    An `update_compatibility_version` equal to the installed version keeps Prism out and changes nothing else: all its
    checks ask for a version before some release.

    Returns:
        The number of worker processes of a local run; None for a runner that has its own.

    Raises:
        ConfigError: A runner that does not exist or loses elements, or a number of workers below 1.
    """
    runner = _runner_name(options.view_as(StandardOptions).runner or LOCAL_RUNNERS[0])
    if runner == "DaskRunner":
        raise ConfigError("runner=DaskRunner: Beam's Dask runner loses elements of tagged outputs; use DirectRunner")
    if runner not in LOCAL_RUNNERS:
        _check_runner(runner)
        return None
    asked = options.view_as(WorkerOptions).num_workers
    workers = min(os.cpu_count() or 1, _MAX_LOCAL_WORKERS) if asked is None else int(asked)
    if workers < 1:
        raise ConfigError(f"num_workers must be 1 or more, got {workers}")
    options.view_as(StandardOptions).runner = runner
    streaming = options.view_as(StreamingOptions)
    streaming.update_compatibility_version = streaming.update_compatibility_version or beam.__version__
    direct = options.view_as(DirectOptions)
    direct.direct_num_workers = workers
    direct.direct_running_mode = "multi_processing" if workers > 1 else "in_memory"
    if workers > 1:
        setup = options.view_as(SetupOptions)
        setup.beam_plugins = [*(setup.beam_plugins or ()), WORKER_START]
    return workers


def _check_runner(name: str) -> None:
    """Makes the runner, as Beam will when the pipeline is built, to find out whether it can be made."""
    try:
        create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:  # unknown, its extra is not installed, no such class
        raise ConfigError(f"runner={name}: {error}") from error


def _runner_name(given: str) -> str:
    """The class of a runner: Beam takes its name in any case, with or without "runner", or with its module."""
    short = given.rpartition(".")[2].lower().removesuffix("runner")
    named = (name for name in (*LOCAL_RUNNERS, "DaskRunner") if name.lower() == f"{short}runner")
    return next(named, given)
