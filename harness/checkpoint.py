"""A model's config.json and safetensors files in a directory: only the bytes asked for are read.

    model = Checkpoint("path/to/Qwen3-0.6B")
    model.prefetch(names)
    extract_layer(model.fields, model.get, layer, model.where)

Nothing but JSON and safetensors is read: no pickle, no code from a checkpoint. `harness.hub` has the same for the hub.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from harness.case import Array, BadInput, is_whole, read_json

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
EMPTY = memoryview(b"")
DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?",
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip

Piece = tuple[bytes | bytearray, int]
"""Some bytes of a file, and the whole file's size."""


class Tensor(NamedTuple):
    """Where a tensor lies, in bytes from its file's start, its shape and its dtype (None: one that NumPy lacks)."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype | None


class Header(NamedTuple):
    """A safetensors header, checked, and its file's size in bytes."""

    tensors: dict[str, Tensor]
    size: int


class Checkpoint:
    """A checkpoint directory. `fields` is its config.json; `where` begins every error. All methods raise BadInput.

    `commit` and `bytes_fetched` are those of `HubModel`; a directory has none.
    """

    commit: str | None = None
    bytes_fetched = 0
    way_out = "download the checkpoint again"

    def __init__(self, directory: Path | str) -> None:
        self.where = str(directory)
        self.headers: dict[str, Header | None] = {}
        self.held: dict[str, Array] = {}
        text = self.whole(CONFIG)
        if text is None:
            raise self.bad(f"no Hugging Face checkpoint, it has no {CONFIG}")
        self.fields = self.json(text, CONFIG)

    def bad(self, what: str, file: str = "") -> BadInput:
        """The error that this is wrong with the checkpoint, or with one file of it."""
        return BadInput(f"{self.where}{file and '/'}{file}: {what}; {self.way_out}")

    def json(self, text: bytes, file: str) -> dict[str, Any]:
        """The JSON object in this text of a file."""
        try:
            return read_json(text, f"{self.where}/{file}")
        except BadInput as error:
            raise BadInput(f"{error}; {self.way_out}") from error

    # -------------------------------------------------------------------------------------------------------- tensors

    def get(self, name: str) -> Array | None:
        """The tensor, dtype as on disk; None where there is none. Read alone, unless `prefetch` has read it."""
        if name not in self.held and name in self.files:
            return self.tensors([name])[name]
        return self.held.get(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Reads those of the tensors that there are together, for `get`; lets go of what it read before."""
        self.held = {}
        self.held = self.tensors([name for name in dict.fromkeys(names) if name in self.files])

    def rows(self, name: str, indices: Sequence[int]) -> Array | None:
        """Rows [len(indices), D] of a tensor [V, D], dtype as on disk, each read once; None where there is none."""
        if name not in self.files:
            return None
        file, (tensor, dtype) = self.files[name], self.tensor(name)
        if len(tensor.shape) != 2 or not all(0 <= index < tensor.shape[0] for index in indices):
            raise self.bad(f"{name} has shape {list(tensor.shape)} and no row {max(indices, default=0)}", file)
        D, distinct = tensor.shape[1], sorted(set(indices))
        width = D * dtype.itemsize
        starts = [tensor.start + index * width for index in distinct]
        read = dict(zip(distinct, self.spans(file, [(start, start + width) for start in starts]), strict=True))
        return np.frombuffer(b"".join(read[index] for index in indices), dtype).reshape(len(indices), D)

    def tensors(self, names: Sequence[str]) -> dict[str, Array]:
        """These tensors of `files`, dtype as on disk, each file read in as few ranges as its order allows."""
        found = {}
        for file in sorted({self.files[name] for name in names}):
            here = {name: self.tensor(name) for name in names if self.files[name] == file}
            data = self.spans(file, [(tensor.start, tensor.stop) for tensor, _ in here.values()])
            for (name, (tensor, dtype)), value in zip(here.items(), data, strict=True):
                found[name] = np.frombuffer(value, dtype).reshape(tensor.shape).copy()  # aligned, alone in memory
        return found

    def tensor(self, name: str) -> tuple[Tensor, np.dtype]:
        """Where a tensor of `files` lies, and its dtype."""
        file = self.files[name]
        header = self.header(file)
        if header is None:
            raise self.bad(f"missing, it should hold {name}", file)
        if name not in header.tensors:
            raise self.bad(f"not a readable safetensors file of this model: it lacks {name}", file)
        tensor = header.tensors[name]
        if tensor.dtype is None:
            raise self.bad(f"{name} holds numbers of a kind that NumPy lacks", file)
        return tensor, tensor.dtype

    @cached_property
    def files(self) -> dict[str, str]:
        """Which file holds which tensor: model.safetensors holds all, else model.safetensors.index.json tells."""
        sharded = self.path(INDEX) is not None and self.path(SINGLE) is None
        single = self.single()
        header = None if sharded else self.header(single)
        if header is not None:
            return dict.fromkeys(header.tensors, single)
        text = self.whole(INDEX)
        if text is None:
            raise self.bad(f"has neither {SINGLE} nor {INDEX}, and only safetensors is read")
        files = self.json(text, INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise self.bad("has no weight_map from tensors to files", INDEX)
        for name, file in files.items():  # the name of a file beside it, nothing else: no .., no /, no pickle
            if not re.fullmatch(r"\w[\w.-]*\.safetensors", file):
                raise self.bad(f"says that {name} lies in {file!r}, which is no safetensors file beside it", INDEX)
        return files

    # --------------------------------------------------------------------------------------------------------- header

    def header(self, file: str) -> Header | None:
        """The file's header, read once and checked; None where there is no such file."""
        if file not in self.headers:
            first = self.read(file, 0, 8)
            self.headers[file] = None if first is None else self.read_header(file, *first)
        return self.headers[file]

    def read_header(self, file: str, first: bytes | bytearray, size: int) -> Header:
        """The header after these 8 bytes: each tensor in bounds, of its shape's size, without gap, overlap or rest."""
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise self.unreadable(file, f"a header of {length:,} bytes, in a file of {size:,}")
        text, _ = self.read(file, 8, 8 + length) or (b"", 0)
        entries = self.json(bytes(text), f"{file}: the safetensors header")
        entries.pop("__metadata__", None)
        tensors = {}
        for name, entry in entries.items():
            try:
                (start, stop), shape, kind = entry["data_offsets"], entry["shape"], entry["dtype"]
                known = all(is_whole(number, 0) for number in (start, stop, *shape)) and isinstance(kind, str)
            except (KeyError, TypeError, ValueError):
                known = False
            if not known:
                raise self.unreadable(file, f"its header's entry of {name}")
            dtype = np.dtype(DTYPES[kind]) if kind in DTYPES else None
            if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
                raise self.unreadable(file, f"{name}: {kind} {shape} in {stop - start} bytes")
            tensors[name] = Tensor(8 + length + start, 8 + length + stop, tuple(shape), dtype)
        end = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1][:2]):
            if tensor.start != end or tensor.stop < end:
                raise self.unreadable(file, f"{name} lies from {tensor.start} to {tensor.stop}, not from {end}")
            end = tensor.stop
        if end != size:
            raise self.unreadable(file, f"its tensors end at {end} of {size} bytes")
        return Header(tensors, size)

    def unreadable(self, file: str, why: str) -> BadInput:
        """The error that a file is no safetensors file, or a broken one."""
        return self.bad(f"not a readable safetensors file ({why})", file)

    # ---------------------------------------------------------------------------------------------------------- bytes

    def spans(self, file: str, wanted: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (start, stop) of a file whose header was read; adjacent ones are read at once."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(span for span in wanted if span[0] < span[1]):
            if merged and start <= merged[-1][1]:
                start, stop = merged[-1][0], max(merged.pop()[1], stop)
            merged.append((start, stop))
        header, read = self.header(file), []
        for start, stop in merged:
            data, size = self.read(file, start, stop) or (b"", 0)
            if header is None or size != header.size:
                raise self.bad("changed while it was read", file)
            read.append((start, stop, memoryview(data)))
        return [
            next((data[start - at : stop - at] for at, end, data in read if at <= start and stop <= end), EMPTY)
            for start, stop in wanted
        ]

    def read(self, file: str, start: int, stop: int) -> Piece | None:
        """Bytes start to stop of a file; None where there is no such file."""
        path = self.path(file)
        if path is None:
            return self.fetch(file, start, stop)
        try:
            with path.open("rb") as opened:
                size = opened.seek(0, 2)
                opened.seek(start)
                data = opened.read(stop - start) if stop <= size else b""
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
        if len(data) != stop - start:
            raise BadInput(f"{path}: not a readable safetensors file (it ends at {size} bytes, before {stop})")
        return data, size

    def path(self, file: str) -> Path | None:
        """Where the file lies on this machine, None where it does not."""
        path = Path(self.where) / file
        return path if path.exists() else None

    def single(self) -> str:
        """The file of a model that is not sharded: model.safetensors, or the only one of its kind that there is."""
        files = [path.name for path in Path(self.where).glob("*.safetensors")]
        return files[0] if len(files) == 1 else SINGLE

    def whole(self, file: str) -> bytes | None:
        """All of a small file, None where there is no such file."""
        path = self.path(file)
        try:
            return None if path is None else path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from error

    def fetch(self, file: str, start: int, stop: int) -> Piece | None:
        """As `read`, for a file that does not lie on this machine."""
        return None
