"""A model's config.json and safetensors files in a directory: only the bytes asked for are read.

    model = Checkpoint("path/to/Qwen3-0.6B")
    model.prefetch(names)
    extract_layer(model.fields, model.get, layer, model.where)

Nothing but JSON and safetensors is read: no pickle, no code from a checkpoint. `harness.hub` has the same for the hub.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.case import Array, BadInput, read_json
from harness.files import Header, Tensor, header_length, read_header, small

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EMPTY = memoryview(b"")

Piece = tuple[bytes | bytearray, int]
"""Some bytes of a file, and the whole file's size."""


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
        return read_json(text, f"{self.where}/{file}", self.way_out)

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
            self.headers[file] = None if first is None else self.check_header(file, *first)
        return self.headers[file]

    def check_header(self, file: str, first: bytes | bytearray, size: int) -> Header:
        """The header after these 8 bytes, checked."""
        try:
            length = header_length(first, size)
        except ValueError as error:
            raise self.unreadable(file, str(error)) from error
        text, _ = self.read(file, 8, 8 + length) or (b"", 0)
        try:
            return read_header(text, size)
        except ValueError as error:
            raise self.unreadable(file, str(error)) from error

    def unreadable(self, file: str, why: str) -> BadInput:
        """The error that a file is no safetensors file, or a broken one."""
        return self.bad(f"not a readable safetensors file ({why})", file)

    def locked(self, file: str, error: OSError) -> BadInput:
        """The error that the system does not let a file be read."""
        return BadInput(f"{self.where}/{file}: cannot be read ({error.strerror}); make it readable, or give another")

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
            raise self.locked(file, error) from error
        if len(data) != stop - start:
            raise self.unreadable(file, f"it ends at {size} bytes" if size else "it is empty")
        return data, size

    def path(self, file: str) -> Path | None:
        """Where the file lies on this machine, None where it does not."""
        path = Path(self.where) / file
        try:
            there, usable = path.exists(), path.is_file()
        except OSError as error:
            raise self.locked(file, error) from error
        if there and not usable:  # to open a pipe is to wait
            raise self.bad("a folder or a device, where a file should be", file)
        return path if there else None

    def single(self) -> str:
        """The file of a model that is not sharded: model.safetensors, or the only one of its kind that there is."""
        files = [path.name for path in Path(self.where).glob("*.safetensors")]
        return files[0] if len(files) == 1 else SINGLE

    def whole(self, file: str) -> bytes | None:
        """All of a small file, None where there is no such file."""
        path = self.path(file)
        try:
            return None if path is None else small(path)
        except OSError as error:
            raise self.locked(file, error) from error
        except ValueError as error:
            raise self.bad(str(error), file) from error

    def fetch(self, file: str, start: int, stop: int) -> Piece | None:
        """As `read`, for a file that does not lie on this machine."""
        return None
