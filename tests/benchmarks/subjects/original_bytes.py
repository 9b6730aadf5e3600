"""A row's body with the original bytes of its pictures, as ours sends them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def original_body(line: bytes) -> bytes:
    """The JSON to post for a line of the input; pictures are JPEG files."""
    body = json.loads(line)["body"]
    for message in body["messages"]:
        if isinstance(message["content"], list):
            message["content"] = [_with_bytes(part) for part in message["content"]]
    return json.dumps(body).encode()


def _with_bytes(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    text = base64.b64encode(Path(part["image_url"]["url"]).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{text}"}}
