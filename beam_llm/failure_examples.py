"""What a failure is shown as, where there is room for one line: on a terminal, in the job's metrics, in the summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from beam_llm.errors import redact
from beam_llm.records import FailedRequest

MAX_EXAMPLE_CHARS = 300
_MAX_ID_CHARS = 80

_ENCODED = re.compile(r"(?<=base64,)[\w+/=-]+|[A-Za-z0-9+/=]{120,}")
"""Base64, as in the picture that a server was sent and repeats; a path of that length has dots or dashes in it."""


def one_line(text: str, most: int = MAX_EXAMPLE_CHARS) -> str:
    """The text in one line without secrets and encoded data, cut to so many characters."""
    line = _ENCODED.sub("…", redact(" ".join(text.split())))
    return line if len(line) <= most else line[: most - 1] + "…"


def failure_example(failed: FailedRequest) -> str:
    """Which row failed, where, and why, in one line of at most `MAX_EXAMPLE_CHARS` characters."""
    row = one_line(failed.custom_id, _MAX_ID_CHARS) or "a row without an id"
    place = failed.endpoint.partition("?")[0]  # some services are given a key in the query
    if failed.status_code is not None:
        place = f"HTTP {failed.status_code} from {place}"
    return one_line(f"{row} ({place}): {failed.message}" if place else f"{row}: {failed.message}")


def prompt_failures(reasons: Mapping[int, str]) -> list[str]:
    """A line for each kind of failure, the most frequent first, with the first prompt that failed so.

    Args:
        reasons: `<kind>: <why>` by the prompt's index.
    """
    kinds = Counter(reason.partition(":")[0] for reason in reasons.values())
    first = {reasons[index].partition(":")[0]: index for index in sorted(reasons, reverse=True)}
    lines = []
    for kind, count in kinds.most_common():
        why = reasons[first[kind]].partition(": ")[2]
        lines.append(f"{count:,} failed ({kind}), for example prompt {first[kind]}: {one_line(why)}")
    return lines
