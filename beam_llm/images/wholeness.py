"""Whether a picture file was cut off: does it reach the end that its own format marks or announces?

Decoders often do not care. They stop once they have the pixels, and make up what stood behind them: a palette, an alpha
channel, a colour profile. A file that was cut off anywhere is refused, so that nobody has to guess.
"""

from __future__ import annotations

import struct

_TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of one value, by the type of a TIFF tag."""
_PCX_GREY = 2
_BOXES = frozenset({
    b"ftyp", b"meta", b"mdat", b"moov", b"idat", b"free", b"skip", b"uuid", b"mpvd", b"mini",
    b"jP  ", b"jp2h", b"jp2c", b"jp2i", b"xml ", b"rreq", b"jpch", b"jplh", b"asoc",
})  # fmt: skip
"""Kinds of top-level boxes of HEIF, AVIF and JPEG 2000."""


def is_cut_off(data: bytes, image_format: str) -> bool:
    """Whether the end of a file is missing; False where its format has no end that could be looked for.

    Args:
        data: The file.
        image_format: By Pillow's names.
    """
    find_out = _CHECKS.get(image_format)
    try:
        return find_out is not None and find_out(data)
    except (struct.error, IndexError):  # it ends within a header
        return True


def _png(data: bytes) -> bool:
    position = 8
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        position += 12 + length
        if kind == b"IEND":
            return bool(position > len(data))


def _jpeg(data: bytes) -> bool:
    """No end-of-image marker behind the start of the first scan: coded data cannot hold one by chance."""
    position = 2
    while True:
        position = data.find(b"\xff", position)
        if position < 0:
            return True
        marker = data[position + 1]
        if marker == 0xDA:
            return data.find(b"\xff\xd9", position) < 0
        has_length = 0xC0 <= marker <= 0xFE and not 0xD0 <= marker <= 0xD9
        position += 2 + struct.unpack_from(">H", data, position + 2)[0] if has_length else 1


def _gif(data: bytes) -> bool:
    position = 13 + _palette_size(data[10])
    while (block := data[position]) != 0x3B:
        if block == 0x21:
            position = _after_sub_blocks(data, position + 2)
        elif block == 0x2C:
            position = _after_sub_blocks(data, position + 11 + _palette_size(data[position + 9]))
        else:
            position += 1  # junk between blocks, which every reader skips
    return False


def _palette_size(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_sub_blocks(data: bytes, position: int) -> int:
    while length := data[position]:
        position += length + 1
    return position + 1


def _webp(data: bytes) -> bool:
    (size,) = struct.unpack_from("<I", data, 4)
    return bool(8 + size > len(data))


def _boxes(data: bytes) -> bool:
    """HEIF, AVIF and JP2: boxes one after another, each with its length. Phones append what is none."""
    position = 0
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, position + 8)
        if size < 8 or kind not in _BOXES:  # 0: up to the end of the file
            return False
        position += size
    return position > len(data)


def _jpeg_2000(data: bytes) -> bool:
    is_bare = data.startswith(b"\xff\x4f\xff\x51")
    return b"\xff\xd9" not in data if is_bare else _boxes(data)


def _tiff(data: bytes) -> bool:
    """The first directory or the values that it points to are not all there. Strips are for the decoder to miss."""
    order = "<" if data.startswith(b"II") else ">"
    (version,) = struct.unpack_from(order + "H", data, 2)
    head, count_form, form = (8, "Q", "HHQQ") if version == 43 else (4, "H", "HHII")
    (directory,) = struct.unpack_from(order + form[-1], data, head)
    (count,) = struct.unpack_from(order + count_form, data, directory)
    first, entry = directory + struct.calcsize(order + count_form), struct.calcsize(order + form)
    for index in range(count):
        _, kind, length, value = struct.unpack_from(order + form, data, first + entry * index)
        size = length * _TIFF_SIZES.get(kind, 0)
        if size > struct.calcsize(order + form[-1]) and value + size > len(data):
            return True
    return False


def _pcx(data: bytes) -> bool:
    """The palette of a picture in 256 colours stands at the end; without it, its numbers would pass for grey."""
    version, bits, channels, kind = data[1], data[3], data[65], data[68]
    has_palette = (version, bits, channels) == (5, 8, 1) and kind != _PCX_GREY
    return has_palette and (len(data) < 128 + 769 or data[-769] != 12)


_CHECKS = {
    "PNG": _png,
    "JPEG": _jpeg,
    "MPO": _jpeg,
    "GIF": _gif,
    "WEBP": _webp,
    "HEIF": _boxes,
    "AVIF": _boxes,
    "JPEG2000": _jpeg_2000,
    "TIFF": _tiff,
    "PCX": _pcx,
}
