"""What the bytes of a picture say without decoding it: is this a plain, whole JPEG or PNG that any server reads alike?

Every function answers None when the file is anything else; the caller then decodes it, which tells the truth.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_START = b"\xff\xd8\xff"
_END_OF_IMAGE = 0xD9
_START_OF_SCAN = 0xDA
_HUFFMAN_8_BIT_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive; lossless and arithmetic coding are not read by every server."""
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xCC}

# Inside a scan 0xFF is followed by 0x00 (a stuffed byte), a restart marker D0-D7 or more fill (ITU-T T.81, B.1.1.5).
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# The same rule as Pillow's getexif, so that a picture is turned alike whether it is decoded here or by a server.
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_SRGB_PRIMARIES = {
    b"rXYZ": (0.4361, 0.2225, 0.0139),
    b"gXYZ": (0.3851, 0.7169, 0.0971),
    b"bXYZ": (0.1431, 0.0606, 0.7139),
}
"""XYZ of red, green and blue, adapted to D50 (ICC.1:2022). Nearly every sRGB profile has them within 0.001; P3's red
is 0.079 away."""
_LONGEST_INFLATABLE_TEXT = 1000
"""Deflate grows data at most 1032-fold and Pillow, in most servers, refuses a text chunk above 1 MiB."""


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A whole, upright, opaque, still, 8-bit RGB or grey sRGB file.

    Args:
        image_format: Pillow's name, `JPEG` or `PNG`.
        width, height: In pixels.
        size: Bytes up to the end marker; what a camera or an editor appended (a film, a preview) is not counted.
    """

    image_format: str
    width: int
    height: int
    size: int


def inspect_file(data: bytes) -> PlainFile | None:
    """Facts about a file that can be sent as it is; None if it must be decoded to know or to mend it.

    The check costs microseconds for a JPEG and one CRC pass for a PNG. It sees every file that was cut off. It cannot
    see damage inside a JPEG's tables and coded data, which have no checksum (a decode finds little of it either), nor
    a PNG whose chunks are intact but were written with too little data in them.
    """
    try:
        if data.startswith(JPEG_START):
            return _inspect_jpeg(data)
        if data.startswith(PNG_SIGNATURE):
            return _inspect_png(data)
    except (struct.error, IndexError):  # a header that ends too early
        return None
    return None


def is_srgb_profile(profile: bytes) -> bool:
    """Whether an ICC profile is sRGB, by the name in its `desc` tag and by its primary colours.

    Curves are not compared: every common sRGB profile (HP/Microsoft, ICC, Adobe, GIMP, lcms, Apple) has "sRGB" in its
    name, in Latin-1 or UTF-16; Facebook's small one is called "c2". Variants with a linear curve do not count, nor
    do phones' "DCI-P3 D65 Gamut with sRGB Transfer".
    """
    if profile[16:20] != b"RGB ":
        return False
    has_name = False
    try:
        (count,) = struct.unpack_from(">I", profile, 128)
        for index in range(min(count, 100)):  # the specification names about 40 tags
            tag, offset, size = struct.unpack_from(">4sII", profile, 132 + 12 * index)
            if tag == b"desc":
                name = profile[offset + 12 : offset + min(size, 512)].replace(b"\0", b"")
                has_name = (b"sRGB" in name and b"inear" not in name and b"-g10" not in name) or name == b"c2"
            elif tag in _SRGB_PRIMARIES:
                primary = struct.unpack_from(">3i", profile, offset + 8)
                if any(abs(a / 65536 - b) > 0.01 for a, b in zip(primary, _SRGB_PRIMARIES[tag], strict=True)):
                    return False
    except struct.error:
        return False
    return has_name


def is_lossless_webp(data: bytes) -> bool:
    """Whether the first picture of a WebP file is stored without loss."""
    lossless, lossy = data.find(b"VP8L", 12), data.find(b"VP8 ", 12)
    return data[8:12] == b"WEBP" and lossless > 0 and not 0 < lossy < lossless


def _inspect_jpeg(data: bytes) -> PlainFile | None:
    """Walk the marker segments up to the first scan, then make sure that the scans reach the end-of-image marker."""
    position, width, height = 2, 0, 0
    profile = b""
    while True:
        while data[position] == data[position + 1] == 0xFF:  # fill bytes before a marker
            position += 1
        lead, marker, length = struct.unpack_from(">BBH", data, position)
        if lead != 0xFF or length < 2 or not 0xC0 <= marker <= 0xFE or 0xD0 <= marker <= 0xD9:
            return None
        start, position = position + 4, position + 2 + length
        if marker == _START_OF_SCAN:
            break
        if marker in _HUFFMAN_8_BIT_FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, start)
            if bits != 8 or channels not in (1, 3):
                return None
        elif marker in _OTHER_FRAMES or (marker == 0xE1 and not _is_upright(data[start:position])):
            return None
        elif marker == 0xE2:
            segment = data[start:position]
            if segment.startswith(b"MPF\0"):  # several pictures in one file
                return None
            if segment.startswith(b"ICC_PROFILE\0"):
                profile += segment[14:]
    end = len(data) if data.endswith(b"\xff\xd9") and position < len(data) - 2 else _end_of_scans(data, position)
    if not (width and height and end) or (profile and not is_srgb_profile(profile)):
        return None
    return PlainFile("JPEG", width, height, end)


def _is_upright(segment: bytes) -> bool:
    """Whether an APP1 segment leaves the picture as it stands: neither Exif nor XMP asks for a turn."""
    if segment.startswith(b"Exif\0\0"):
        return _exif_orientation(segment[6:]) == 1
    return _xmp_is_upright(segment)


def _xmp_is_upright(text: bytes) -> bool:
    found = _XMP_ORIENTATION.search(text)
    return found is None or found[1] in b"01"


def _end_of_scans(data: bytes, position: int) -> int:
    """Offset after the end-of-image marker of a file that has something behind it; 0 if there is no such marker."""
    while found := _MARKER_IN_SCAN.search(data, position):
        if data[found.end() - 1] == _END_OF_IMAGE:
            return found.end()
        (length,) = struct.unpack_from(">H", data, found.end())
        position = found.end() + length
    return 0


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag of an Exif block, 1 if it has none, 0 if the block cannot be read."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 0
    try:
        (offset,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, offset)
        for index in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, offset + 2 + 12 * index)
            if tag == 0x0112:
                return int(value) if kind == 3 else 0
    except struct.error:
        return 0
    return 1


def _inspect_png(data: bytes) -> PlainFile | None:
    """Walk the chunks, each with its checksum, to the end chunk."""
    width, height, bits, colour = struct.unpack_from(">IIBB", data, 16)
    if data[12:16] != b"IHDR" or bits != 8 or colour not in (0, 2) or not (width and height):
        return None
    view = memoryview(data)
    position, has_pixels = 8, False
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        (checksum,) = struct.unpack_from(">I", data, end)
        if zlib.crc32(view[position + 4 : end]) != checksum:
            return None
        if kind == b"IEND":
            return PlainFile("PNG", width, height, end + 4) if has_pixels else None
        has_pixels = has_pixels or kind == b"IDAT"
        if kind != b"IDAT" and not _is_harmless(kind, data[position + 8 : end]):
            return None
        position = end + 4


def _is_harmless(kind: bytes, content: bytes) -> bool:
    """Whether a PNG chunk leaves the picture opaque, still, upright and sRGB, and holds no text that explodes."""
    if kind in (b"tRNS", b"acTL"):
        return False
    if kind == b"eXIf":
        return _exif_orientation(content) == 1
    if kind in (b"tEXt", b"zTXt") and content.startswith(b"Raw profile type"):  # where ImageMagick puts Exif
        return False
    if kind == b"zTXt":
        return len(content) <= _LONGEST_INFLATABLE_TEXT
    if kind == b"iTXt":
        is_packed = content.partition(b"\0")[2][:1] == b"\1"
        return not is_packed and _xmp_is_upright(content)
    if kind == b"iCCP":
        packed_profile = content.partition(b"\0")[2][1:]
        try:
            return is_srgb_profile(zlib.decompressobj().decompress(packed_profile, 1 << 20))
        except zlib.error:
            return False
    return True
