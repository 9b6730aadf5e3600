"""Lines of files by byte ranges: every line once, whatever the bytes and wherever the ranges end."""

from __future__ import annotations

import gzip
import itertools
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from beam_llm import sources
from beam_llm.files import FileRange, InputError, is_gzip, match_files
from beam_llm.lines import read_lines
from beam_llm.records import Shard
from beam_llm.sources import plan_ranges

BOM = b"\xef\xbb\xbf"
Found = list[tuple[int, bytes]]

pieces = st.sampled_from(
    [
        *[b"\n", b"\r\n", b"\r", b"\r\r\n", b" ", b"\t\n", b"a", b'{"x":1}', b"bb\n", BOM, b"\x0b", b"\x0c", b"\x00"],
        *[b"\xe0\x41", b"long" * 3000, *(separator.encode() for separator in "\u2028\u2029\u0085")],
    ]
)
contents = st.lists(pieces, max_size=30).map(b"".join)
on_shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def expected(content: bytes) -> Found:
    """The rule in other words: LF ends a line, CRs before it go, blank lines are no lines, a first BOM is not there."""
    found, offset = [], 0
    for piece in content.split(b"\n"):
        line = piece[len(BOM) :] if offset == 0 and piece.startswith(BOM) else piece
        if line.strip(b" \t\r\n\x0b\x0c"):
            found.append((offset, line.rstrip(b"\r")))
        offset += len(piece) + 1
    return found


def read(parts: Iterable[FileRange]) -> Found:
    return [(line.offset, line.data) for part in parts for line in read_lines(part)]


def stored(folder: Path, content: bytes, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_bytes(gzip.compress(content, 1, mtime=0) if name.endswith(".gz") else content)
    return str(path)


def planned(path: str, limit: int | None = None) -> list[FileRange]:
    return plan_ranges(match_files([path]), limit)


@given(contents, st.lists(st.integers(1, 40_000), max_size=12))
@example(b"a\r\nb\r\n", [1, 1, 1, 1, 1])
@example(BOM + b"a\nb", [1, 1, 1])
@example(b"long" * 3000 + b"\nb\n", [5000, 6999, 1])
@on_shared_folder
def test_ranges_of_any_size_give_every_line_once_at_its_offset(
    tmp_path: Path, content: bytes, sizes: list[int]
) -> None:
    """C42, C43, C44, C46: all ranges together are one whole read."""
    path = stored(tmp_path, content)
    edges = [0, *(edge for edge in itertools.accumulate(sizes) if edge < len(content))]
    parts = [FileRange(path, start, end) for start, end in zip(edges, [*edges[1:], None], strict=True)]
    assert read(parts) == read([FileRange(path)]) == expected(content)


@given(contents, st.integers(1, 3000))
@on_shared_folder
def test_planned_ranges_and_limits_are_the_first_rows_of_one_whole_read(
    tmp_path: Path, content: bytes, range_bytes: int
) -> None:
    files = [(stored(tmp_path, content, name), len(content)) for name in ("a.jsonl", "b.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_MIN_RANGE", range_bytes)
        whole = [line for path, _ in files for line in read([FileRange(path)])]
        assert read(plan_ranges(files)) == whole
        for limit in (1, len(whole) // 2, len(whole), len(whole) + 1):
            assert read(plan_ranges(files, limit)) == whole[:limit]


@given(contents)
@on_shared_folder
def test_gzip_gives_the_same_lines_at_their_unpacked_offsets(tmp_path: Path, content: bytes) -> None:
    """C48: by its name, and by its first bytes where the name does not tell."""
    path = stored(tmp_path, content, "rows.jsonl.gz")
    disguised = Path(path).rename(tmp_path / "rows.jsonl")
    Path(path).write_bytes(disguised.read_bytes())
    for name in (path, str(disguised)):
        assert is_gzip(name)
        assert read(planned(name)) == expected(content)
        for limit in (1, 3):
            assert read(planned(name, limit)) == expected(content)[:limit]


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    """C42: two rows, no dead letters."""
    path = stored(tmp_path, b'{"custom_id":"a"}\n\n   \n{"custom_id":"b"}\n\n')
    assert read(planned(path)) == [(0, b'{"custom_id":"a"}'), (23, b'{"custom_id":"b"}')]


def test_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    """C43: both rows are read; a mark elsewhere is the row's own text."""
    path = stored(tmp_path, BOM + b"{}\n" + BOM + b"x\n")
    assert read(planned(path)) == [(0, b"{}"), (6, BOM + b"x")]


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    """C44: the separators of Unicode are text."""
    row = '{"x":"a\u2028b\u2029c\u0085d\u000be\u000cf"}'.encode()
    assert read(planned(stored(tmp_path, row + b"\r\n" + row))) == [(0, row), (len(row) + 2, row)]


def test_bytes_that_are_not_utf8_do_not_stop_the_file(tmp_path: Path) -> None:
    """C45: what a line means is not the reader's business."""
    path = stored(tmp_path, b'{"a":1}\n{"a":"\xe0\x41"}\n{"a":2}\n')
    assert [data for _, data in read(planned(path))] == [b'{"a":1}', b'{"a":"\xe0\x41"}', b'{"a":2}']


def test_a_split_at_every_byte_of_a_crlf_file_gives_each_row_once(tmp_path: Path) -> None:
    """C46: also between the two characters of a line end."""
    content = b"".join(b"%d" % n * (n % 5 + 1) + b"\r\n" for n in range(60))
    path = stored(tmp_path, content)
    for edge in range(1, len(content)):
        assert read([FileRange(path, 0, edge), FileRange(path, edge, None)]) == expected(content)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
def test_gzip_in_several_members_is_read_to_its_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"b\nc\n"))
    assert [data for _, data in read(planned(str(path)))] == [b"a", b"bb", b"c"]


def rows_of_gzip() -> bytes:
    return b"".join(b'{"custom_id":"%d","x":"%s"}\n' % (n, str(n * 7919).encode() * 9) for n in range(3000))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_cut_gzip_is_an_error_after_every_line_that_came_whole(tmp_path: Path, share: float) -> None:
    """C48: never a short success."""
    packed = gzip.compress(rows_of_gzip())
    cut = packed[: int(len(packed) * share)]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(cut)
    readable = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(cut)
    found: Found = []
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz: the gzip file is cut off or damaged behind byte \d+"):
        found.extend((line.offset, line.data) for line in read_lines(FileRange(str(path))))
    whole = readable[: readable.rindex(b"\n") + 1]
    assert found == expected(whole)[: len(found)]
    assert len(whole) - found[-1][0] < 128 * 1024  # what gzip had in hand when the end failed to come


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(rows_of_gzip()))
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz"):
        read(planned(str(path)))


def test_plain_file_with_the_name_of_a_gzip_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"a\nb\n")
    assert read(planned(str(path))) == [(0, b"a"), (2, b"b")]


@pytest.mark.parametrize("told", [1, 20_000, 60_000])
def test_a_file_that_is_longer_than_its_size_says_is_read_to_its_end(tmp_path: Path, told: int) -> None:
    """C48: a store that unpacks objects on the way reports the packed size."""
    content = b"".join(b"%09d\n" % n for n in range(10_000))
    assert read(plan_ranges([(stored(tmp_path, content), told)])) == expected(content)


def test_a_large_file_is_split_into_ranges_of_even_size_without_gaps(tmp_path: Path) -> None:
    path = stored(tmp_path, b"x" * 50_000 + b"\n")
    parts = planned(path)
    assert [part.start for part in parts] == [0, 16384, 32768, 49152]
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]


def test_many_files_make_no_more_ranges_than_are_worth_shuffling() -> None:
    parts = plan_ranges([("/nowhere/a.jsonl.gz", 1 << 40), ("/nowhere/b.jsonl.gz", 5)])
    assert parts == [
        FileRange("/nowhere/a.jsonl.gz", shard=Shard(0, 2)),
        FileRange("/nowhere/b.jsonl.gz", shard=Shard(1, 2)),
    ]


def test_limit_reads_no_file_behind_the_last_row_wanted(tmp_path: Path) -> None:
    first = stored(tmp_path, b"a\nb\n", "a.jsonl")
    assert read(plan_ranges([(first, 4), ("/nowhere/b.jsonl", 4)], limit=2)) == [(0, b"a"), (2, b"b")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_weights_add_up_to_the_bytes_of_the_file(tmp_path: Path, name: str) -> None:
    path = stored(tmp_path, b"first\n" + b"second\r\n" * 5000, name)
    weights = [line.weight for line in read_lines(FileRange(path))]
    assert sum(weights) == Path(path).stat().st_size
    assert min(weights) >= 0


def test_patterns_match_files_once_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        stored(tmp_path, b"123", name)
    found = match_files([f"{tmp_path}/c.txt", f"{tmp_path}/*.jsonl", f"{tmp_path}/a*"])
    assert found == [(f"{tmp_path}/{name}", 3) for name in ("c.txt", "a.jsonl", "b.jsonl")]


def test_pattern_that_matches_nothing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file matches '.*/none-\*\.jsonl'"):
        match_files([f"{stored(tmp_path, b'a')}", f"{tmp_path}/none-*.jsonl"])


def seconds_to_read(parts: list[FileRange]) -> float:
    def once() -> float:
        started = time.process_time()
        assert sum(len(data) for _, data in read(parts)) > 0
        return time.process_time() - started

    return min(once() for _ in range(4))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_time_for_a_long_line_grows_with_its_length_not_its_square(tmp_path: Path, name: str) -> None:
    """C93: four times the length; the square would take sixteen times as long."""
    short, long = (stored(tmp_path, b"x" * (mb << 20) + b"\n", f"{mb}-{name}") for mb in (5, 20))
    assert seconds_to_read(planned(long)) < 10 * seconds_to_read(planned(short)) + 0.05


def test_a_line_that_reaches_over_many_ranges_is_read_about_once(tmp_path: Path) -> None:
    """C93: each range reads on to the end of its last line, but none reads the middle of another's."""
    path = stored(tmp_path, b"x" * (20 << 20) + b"\n")
    parts = planned(path)
    assert len(parts) > 100
    assert seconds_to_read(parts) < 10 * seconds_to_read([FileRange(path)]) + 0.05
