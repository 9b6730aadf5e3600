"""The output folder: what may not be lost in it, and what a run leaves behind there."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

import orjson
from apache_beam.io.filesystems import FileSystems

from beam_llm.errors import ConfigError

SUMMARY, VALIDATION = "summary.json", "validation.json"
INVALID = "invalid"
"""What the files of rows that cannot be sent begin with, when nothing was to be sent."""

_RESULTS = ("completed", "failed")
_SUFFIXES = ("jsonl", "parquet")
_RESULT_NAME = re.compile(
    rf"({'|'.join((*_RESULTS, INVALID))})-.*-of-.*\.({'|'.join(_SUFFIXES)})|{SUMMARY}|{VALIDATION}"
)


def job_of(patterns: Iterable[str], limit: int | None) -> dict[str, Any]:
    """What makes two runs the same job, for `summary.json`: their input and how much of it."""
    return {"input": [_absolute(pattern) for pattern in patterns], "limit": limit}


def check_output(output: str) -> None:
    """Makes a local output folder, to find out whether it can be one; a bucket is left to the run.

    Raises:
        ConfigError: It is a file, or cannot be written to.
    """
    if "://" in output:
        return
    try:
        os.makedirs(output, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(f"output={output}: {error.strerror}; name a folder that can be written to") from error


def refuse_loss(output: str, files: Iterable[str], job: dict[str, Any]) -> None:
    """Refuses a run that would replace what it reads, or the results of another job.

    Args:
        output: The output folder.
        files: The input files.
        job: `job_of` the run.

    Raises:
        ConfigError: Says what would be lost, and the way out.
    """
    folder = _absolute(output).rstrip("/")
    for path in files:
        place, _, name = _absolute(path).rpartition("/")
        if place == folder and _RESULT_NAME.fullmatch(name):
            raise ConfigError(
                f"input {path} is a result file of output={output}, which the run replaces; name another output"
            )
    before = _read_job(FileSystems.join(output, SUMMARY))
    if before is None:
        return
    smaller = job["limit"] is not None and (before["limit"] is None or job["limit"] < before["limit"])
    if before["input"] != job["input"] or smaller:
        of = f"{','.join(before['input'])}" + (f", limit {before['limit']}" if before["limit"] else "")
        raise ConfigError(
            f"output={output} holds the results of another job (input {of}), which this run would replace: "
            "name another output, or remove that folder's summary.json"
        )


def _read_job(path: str) -> dict[str, Any] | None:
    if not FileSystems.exists(path):
        return None
    with FileSystems.open(path) as file:
        try:
            found = orjson.loads(file.read())
        except ValueError:
            return None  # not one of ours
    return found if isinstance(found, dict) and {"input", "limit"} <= found.keys() else None


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


class StaleResults:
    """Result files that an earlier run left in the output folder; make it before the run.

    Args:
        output: The output folder.
    """

    def __init__(self, output: str) -> None:
        self._output = output
        self._before = _result_files(output)
        self._unfinished = _unfinished_files(output)

    def remove(self) -> None:
        """Deletes those that the run has not written anew, as a rerun may make fewer shards, or have no failures; and
        what killed runs have left half written."""
        after = _result_files(self._output)
        if stale := [path for path, written in self._before.items() if after.get(path) == written]:
            FileSystems.delete(stale)
        for folder in self._unfinished:
            shutil.rmtree(folder, ignore_errors=True)


def _result_files(output: str) -> dict[str, float]:
    """When each result file was last written, in seconds."""
    patterns = [FileSystems.join(output, f"{name}-*-of-*.{suffix}") for name in _RESULTS for suffix in _SUFFIXES]
    return {m.path: m.last_updated_in_seconds for found in FileSystems.match(patterns) for m in found.metadata_list}


def _unfinished_files(output: str) -> list[str]:
    """Folders that Beam's file sinks of a killed run have left in a local output folder."""
    if "://" in output or not os.path.isdir(output):
        return []
    begun = tuple(f"beam-temp-{name}-" for name in _RESULTS)
    return [entry.path for entry in os.scandir(output) if entry.name.startswith(begun) and entry.is_dir()]
