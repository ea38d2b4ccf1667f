"""What is read of other people's files: JSON, taken strictly, and the header of a safetensors file.

Nothing else ever is: no pickle, no code. Both raise ValueError, in words that fit into one line.
"""

import difflib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

LONGEST_HEADER = 10_000_000  # bytes: a hundred thousand tensors; as Python objects it takes twenty times as much memory
LARGEST_SMALL_FILE = 100_000_000  # bytes: config.json, an index, tokenizer.json
DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?",
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
BEGINNINGS = {
    b"version ": "it is a Git LFS pointer in place of the file; run: git lfs pull",
    b"<": "it is a web page or XML",
    b"{": "it is JSON text",
    b"PK\x03\x04": "it is a zip archive, as .npz, .pt and .bin files are, and only safetensors is read",
    b"\x80\x02\x8a\x0a": "it is a Python pickle, and only safetensors is read",
    b"\x80\x04\x95": "it is a Python pickle, and only safetensors is read",
    b"\x80\x05\x95": "it is a Python pickle, and only safetensors is read",
    b"\x93NUMPY": "it is a .npy file, and only safetensors is read",
    b"\x89HDF": "it is an HDF5 file, and only safetensors is read",
    b"GGUF": "it is a GGUF file, and only safetensors is read",
    b"\x1f\x8b\x08": "it is compressed",
}
"""What a file that is no safetensors file is, by its first bytes."""


def is_whole(value: Any, least: int) -> bool:
    """A whole number of at least this."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """A finite number, and neither true nor false, which Python takes for 1 and 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1.7976931348623157e308


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of the names (of the first thousand: it takes its time), if one is."""
    return next(iter(difflib.get_close_matches(name, itertools.islice(names, 1000), 1)), None)


# ---------------------------------------------------------------------------------------------------------------- JSON


def parse(text: str | bytes) -> Any:
    """The JSON value: UTF-8, each name once in an object, every number one that float64 holds. Raises ValueError."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(
            text, parse_constant=refuse, parse_float=number, parse_int=whole_number, object_pairs_hook=once
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(value, dict | list):
        check_nesting(value)
    return value


def refuse(constant: str) -> None:
    """For NaN and Infinity, which Python's reader takes and JSON does not know."""
    raise ValueError(f"{constant} is no JSON number")


def number(text: str) -> float:
    """A number with a point or an exponent; `json` makes infinity of one that is too large."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def whole_number(text: str) -> int:
    """A number without; Python takes quadratic time for one of many digits."""
    if len(text) > 300:
        raise ValueError(f"a number of {len(text):,} digits is too large")
    return int(text)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; of two of one name, `json` takes the last without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} stands in it twice")
    return found


def check_nesting(value: Any, levels: int = 50) -> None:
    """Raises ValueError where an object or a list has more levels; what writes JSON, indented, goes as deep as it."""
    if not levels:
        raise ValueError("it is nested too deeply")
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            check_nesting(each, levels - 1)


def small(path: Path) -> bytes:
    """All of a file that is read whole. Raises OSError, and ValueError for one of gigabytes."""
    if (size := path.stat().st_size) > LARGEST_SMALL_FILE:
        raise ValueError(f"{size:,} bytes, of which at most {LARGEST_SMALL_FILE:,} are read")
    return path.read_bytes()


# --------------------------------------------------------------------------------------------------------- safetensors


class Tensor(NamedTuple):
    """Where a tensor lies, in bytes from its file's start, its shape and its dtype (None: one that NumPy lacks)."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype | None


class Header(NamedTuple):
    """A safetensors header, checked, and its file's size in bytes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    size: int


def header_length(first: bytes | bytearray, size: int) -> int:
    """The length of the header of a file of this size that begins with these eight bytes. Raises ValueError."""
    if len(first) < 8:
        raise ValueError(f"it ends at {size} bytes" if size else "it is empty")
    length = int.from_bytes(first, "little")
    if 2 <= length <= min(LONGEST_HEADER, size - 8):
        return length
    for beginning, what in BEGINNINGS.items():
        if first.startswith(beginning) and (len(beginning) > 1 or first[7]):  # a length has no eighth byte, text has
            raise ValueError(what)
    most = f"; at most {LONGEST_HEADER:,} are read" if length <= size - 8 else ""
    raise ValueError(f"it would have a header of {length:,} bytes, in a file of {size:,}{most}")


def read_header(text: bytes | bytearray, size: int) -> Header:
    """This header of a file of this size: each tensor in bounds, of its shape's size, without gap, overlap or rest.

    Raises ValueError.
    """
    try:
        entries = parse(bytes(text))
    except ValueError as error:
        raise ValueError(f"its header cannot be read as JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no table of texts")
    tensors = {name: read_entry(name, entry, 8 + len(text)) for name, entry in entries.items()}
    end = 8 + len(text)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][:2]):
        if tensor.start != end or tensor.stop < end:
            lies = f"{name} lies from byte {tensor.start:,} to {tensor.stop:,}"
            raise ValueError(f"its tensors overlap, or leave a gap: {lies}, the one before it to {end:,}")
        end = tensor.stop
    if end > size:
        raise ValueError(f"it is cut off after {size:,} of {end:,} bytes")
    if end < size:
        raise ValueError(f"it goes on for {size - end:,} byte{'s' * (size > end + 1)} after its last tensor")
    return Header(tensors, metadata, size)


def mapped(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a file that we wrote, mapped: only what is looked at is read. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        header = read_header(file.read(header_length(file.read(8), size)), size)
    return {
        name: np.memmap(path, each.dtype, "r", each.start, each.shape).view(np.ndarray)
        for name, each in header.tensors.items()
        if each.dtype is not None
    }


def read_entry(name: str, entry: Any, begin: int) -> Tensor:
    """A tensor of a header whose file's data begin at this byte. Raises ValueError."""
    try:
        (start, stop), shape, kind = entry["data_offsets"], entry["shape"], entry["dtype"]
        known = len(shape) <= 32 and all(is_whole(each, 0) and each < 2**63 for each in (start, stop, *shape))
    except (KeyError, TypeError, ValueError):
        known = False
    if not known or not isinstance(kind, str):
        raise ValueError(f"its header's entry of {name} is unusable")
    dtype = np.dtype(DTYPES[kind]) if kind in DTYPES else None
    if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {kind} {shape} in {stop - start} bytes")
    if math.prod(size or 1 for size in shape) >= 2**60:  # an empty one that NumPy cannot make
        raise ValueError(f"{name}: {kind} {shape}")
    return Tensor(begin + start, begin + stop, tuple(shape), dtype)
