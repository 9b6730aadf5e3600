"""What the clients are given."""

from __future__ import annotations

import json
from pathlib import Path

from beam_llm.config import ChatConfig
from beam_llm.images.encoder import ImageEncoder
from tests.benchmarks import inputs


def test_no_picture_of_a_measure_comes_out_of_the_cache(tmp_path: Path) -> None:
    made = inputs.pictures(tmp_path, "set", 6, 2, (64, 48), 3)
    file = inputs.image_rows(tmp_path, "set", made)
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    encoder = ImageEncoder(ChatConfig(base_urls=("http://localhost/v1",), model="m").images)
    urls = [encoder.url(row["body"]["messages"][0]["content"][1]["image_url"]["url"]) for row in rows]
    assert len({id(url) for url in urls}) == 6
    assert encoder.url(str(made[0])) is urls[0]  # this is how a hit would look


def test_pictures_are_the_same_bytes_in_every_run(tmp_path: Path) -> None:
    first, second = (inputs.pictures(tmp_path, name, 2, 2, (640, 480), 40) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes() != first[1].read_bytes()
    assert all(32_000 < path.stat().st_size < 48_000 for path in first)
