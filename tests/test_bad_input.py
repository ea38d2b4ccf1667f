"""Whatever is wrong with what a user gives, one line says what, where and what to do; nothing is written or lost.

`BAD` is the table. Each row starts from the folder that `good` makes, in which every command works, and is run there.
"""

import ast
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_artifact import WHERE
from test_artifact import document as example
from test_structure_of_code import SOURCES, imports_of

from harness import artifact, case, compare, export
from harness.case import Arrays, BadInput, Case, seeded_case, write_tensors
from harness.runners import fetch, store
from impls.spec import AttentionConfig, weight_shapes

CONFIG = AttentionConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5)
FIELDS = {
    "model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 11, "rope_theta": 5e4,
}  # fmt: skip
WEIGHTS, INDEX = Path("m/model.safetensors"), Path("m/model.safetensors.index.json")
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_norm.weight"
M = ["--weights", "m", "--layer", "1"]
W, CHAPTER = "w/seeded-0.safetensors", "w/seeded-0.chapter.safetensors"
CASE = ["--weights", W]
ARTIFACT, REPORT = "artifacts/attention_check.json", "artifacts/report.html"
TRACE = "artifacts/traces/before/numpy.layer0.chapter.model.float32.safetensors"
REJUDGE = ["--rejudge", "artifacts"]
Arguments = Sequence[str]


class Bad(NamedTuple):
    """One row: what is made wrong, the one line ("…" stands for anything), the command, and the state it runs in."""

    make: Callable[[], Arguments]
    line: str
    command: Callable[[Sequence[str]], int] = export.main
    under: Callable[[], AbstractContextManager[object]] = nullcontext


# -------------------------------------------------------------------------------------------------- what works, changed


def good() -> None:
    """A checkpoint m/ of eleven layers, an exported case w/, what was written of them before, and an artifact."""
    tensors = {
        f"model.layers.{i}.self_attn.{name}": np.full(shape, i + 1, np.float32)
        for i in range(11)
        for name, shape in weight_shapes(CONFIG).items()
    }
    Path("m").mkdir()
    save_file(tensors, WEIGHTS)
    Path("m/config.json").write_text(json.dumps(FIELDS))
    case = seeded_case(Path("w"), config=CONFIG)
    for arguments in (M, CASE, [*CASE, "--case", "kit"]):
        assert export.main(arguments) == 0
    for path in Path().rglob("*.safetensors"):
        path.chmod(0o644)  # the library lets nobody else read what it writes
    old_run(case)


def old_run(case: Case) -> None:
    """artifacts/, as a run of w/ leaves it."""
    Path(TRACE).parent.mkdir(parents=True)
    sha = case.sha256
    document = example(
        traces="traces/before",
        weights={"source": case.source, "description": case.describe(), "sha256": sha["weights"]},
        inputs={name: {**case.made[name], "sha256": sha[name]} for name in case.inputs},
        checks=[artifact.judged(0.0, 1.0, **(WHERE | {"input": "chapter", "rope": "model"}))._asdict()],
    )
    artifact.write(document, ARTIFACT)
    save_file({"output": np.ones((1, 12, 48), np.float32)}, TRACE)
    Path(REPORT).write_text("<html>before</html>")


def after(do: Callable[[], object], use: Arguments = M) -> Callable[[], Arguments]:
    def make() -> Arguments:
        do()
        return use

    return make


def folder_there() -> None:
    Path("new/m-layer1.stress.safetensors").mkdir(parents=True)


def plain(*arguments: str) -> Callable[[], Arguments]:
    return lambda: arguments


def content(
    change: Callable[[bytes], bytes], path: str | Path = WEIGHTS, use: Arguments = M
) -> Callable[[], Arguments]:
    """The bytes of a file changed."""

    def make() -> Arguments:
        Path(path).write_bytes(change(Path(path).read_bytes()))
        return use

    return make


def holds(data: bytes | str, path: str | Path = WEIGHTS, use: Arguments = M) -> Callable[[], Arguments]:
    """Other bytes in a file's place."""
    return content(lambda _: data.encode() if isinstance(data, str) else data, path, use)


def header(change: Callable[[dict[str, Any]], object], path: str | Path = WEIGHTS, use: Arguments = M) -> Any:
    """A safetensors file's header changed, its data left as they are."""

    def changed(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        change(entries)
        return with_header(json.dumps(entries).encode(), data[end:])

    return content(changed, path, use)


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def entry(**fields: Any) -> Callable[[], Arguments]:
    return header(lambda entries: entries[Q].update(fields))


def tensors(change: Callable[[Arrays], object], path: str | Path = WEIGHTS, use: Arguments = M) -> Any:
    """The tensors of a file changed, its metadata kept."""

    def make() -> Arguments:
        arrays, metadata = load_file(path), stored(Path(path))
        change(arrays)
        save_file(arrays, path, metadata)
        return use

    return make


def stored(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})


def tensor(value: Any, name: str = Q) -> Callable[[], Arguments]:
    return tensors(lambda arrays: arrays.update({name: value}))


def holed(value: float) -> np.ndarray:
    x = np.zeros((60, 48))
    x[3, 4:6] = value
    return x


def config(use: Arguments = M, /, **fields: Any) -> Callable[[], Arguments]:
    """config.json with these fields; ... leaves one out."""
    kept = {name: value for name, value in (FIELDS | fields).items() if value is not ...}
    return holds(json.dumps(kept), "m/config.json", use)


def field(text: str) -> Callable[[], Arguments]:
    """config.json with more text in its object."""
    return holds(json.dumps(FIELDS)[:-1] + f", {text}}}", "m/config.json")


def index(table: Any, use: Arguments = M) -> Callable[[], Arguments]:
    """The checkpoint as one shard, with this index."""

    def make() -> Arguments:
        WEIGHTS.rename("m/shard.safetensors")
        INDEX.write_text(table if isinstance(table, str) else json.dumps(table))
        return use

    return make


def shard(file: str, then: Callable[[Path], object] = lambda path: None) -> Callable[[], Arguments]:
    """An index by which q_proj lies in this file."""

    def make() -> Arguments:
        then(Path("m", file))
        return index({"weight_map": {Q: file}})()

    return make


def instead(path: str, then: Callable[[Path], object], use: Arguments = M) -> Callable[[], Arguments]:
    """Something else than a file at this path."""

    def make() -> Arguments:
        Path(path).unlink()
        then(Path(path))
        return use

    return make


def metadata(key: str, change: Any, path: str = W, use: Arguments = CASE) -> Callable[[], Arguments]:
    """An exported file's metadata: a text, or fields of the object that it is; None leaves it out, ... a field."""

    def make() -> Arguments:
        texts = stored(Path(path))
        if isinstance(change, dict):
            fields = {name: value for name, value in (json.loads(texts[key]) | change).items() if value is not ...}
            texts[key] = json.dumps(fields)
        else:
            texts[key] = change
        save_file(load_file(path), path, {name: text for name, text in texts.items() if text is not None})
        return use

    return make


def exported(change: Callable[[Arrays], object], path: str = W) -> Callable[[], Arguments]:
    return tensors(change, path, CASE)


def missing(*names: str) -> Callable[[Arrays], object]:
    return lambda arrays: [arrays.pop(name) for name in names]


def renamed(old: str, new: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({new: arrays.pop(old)})


def sparse(size: int) -> Callable[[Path], object]:
    """A file of this size, which takes no room."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write((size - 8).to_bytes(8, "little"))
            file.truncate(size)

    return make


def without(path: str | Path, use: Arguments = M) -> Callable[[], Arguments]:
    return after(Path(path).unlink, use)


def linked(path: Path) -> None:
    """A link to a file outside of the checkpoint, which is a zip archive."""
    Path("x.bin").write_bytes(zipped())
    path.symlink_to("../x.bin")


def old(change: Callable[[dict[str, Any]], object]) -> Callable[[], Arguments]:
    """The artifact from before, changed."""

    def make() -> Arguments:
        document = json.loads(Path(ARTIFACT).read_text())
        change(document)
        Path(ARTIFACT).write_text(json.dumps(document))
        return [*REJUDGE, *CASE]

    return make


def trace(name: str, data: Any, use: str = "") -> Callable[[], Arguments]:
    """A file for --trace: bytes, or tensors."""

    def make() -> Arguments:
        Path("answers").mkdir()
        path = Path("answers", name)
        path.write_bytes(data) if isinstance(data, bytes) else save_file(*data[:1], path, *data[1:])
        return ["--weights", W, "--trace", use or str(path)]

    return make


def port(function: str) -> Callable[[], Arguments]:
    """A candidate of a file that has one function and one number."""

    def make() -> Arguments:
        Path("port.py").write_text("NUMBER = 3\ndef output(weights, inputs, config):\n    return None\n")
        return ["--weights", W, "--candidate", function]

    return make


def zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", b"")
    return data.getvalue()


def npy() -> bytes:
    data = io.BytesIO()
    np.save(data, np.ones(3))
    return data.getvalue()


@contextmanager
def full_disk(room: int = 8000) -> Iterator[None]:
    """No file can become longer than these bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def nobody() -> Iterator[None]:
    """Permissions hold, also where the tests are run by root."""
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("run by root on a system without other users: no permission is missing")
    try:
        yield
    finally:
        os.seteuid(0)


def locked(path: str, mode: int, use: Arguments = M) -> Callable[[], Arguments]:
    return after(lambda: Path(path).chmod(mode), use)


def broken(why: str) -> str:
    return f"m/model.safetensors: not a readable safetensors file ({why}); download the checkpoint again"


def no_json(why: str) -> str:
    return f"m/config.json cannot be read as JSON: {why}; download the checkpoint again"


def unusable(why: str) -> str:
    return f"m/config.json: the configuration is unusable: {why}"


def unsupported(what: str) -> str:
    return f"m/config.json: {what}, which is not supported yet; choose another layer or model"


# ------------------------------------------------------------------------------------------------------------ the table

DEEP = "[" * 100_000
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 345560\n"
U8 = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
BACKWARDS = {"a": U8, "b": {"dtype": "F4", "shape": [1], "data_offsets": [16, 8]}}
SLIDING = ["full_attention", "sliding_attention"] + ["full_attention"] * 9
OTHER_SHA = {"weights": {"source": {"kind": "seeded"}, "sha256": "0" * 64}}
HALF = np.repeat(np.float32([[0, 1]]), 6, axis=1)
OUTPUT = {"output": np.ones((1, 12, 48), np.float32)}

# fmt: off
BAD: dict[str, Bad] = {
    # ------------------------------------------------------------------------- a file of weights that is something else
    "empty": Bad(holds(""), broken("it is empty")),
    "seven bytes": Bad(holds("1234567"), broken("it ends at 7 bytes")),
    "Git LFS pointer": Bad(holds(LFS), broken("it is a Git LFS pointer in place of the file; run: git lfs pull")),
    "HTML error page": Bad(holds("<!DOCTYPE html>\n<html><title>404</title></html>"),
        broken("it is a web page or XML")),
    "JSON": Bad(holds('{"weight_map": {}}'), broken("it is JSON text")),
    ".npz": Bad(holds(zipped()),
        broken("it is a zip archive, as .npz, .pt and .bin files are, and only safetensors is read")),
    ".npy": Bad(holds(npy()), broken("it is a .npy file, and only safetensors is read")),
    "pickle": Bad(holds(pickle.dumps({"q": [1.0] * 2000}, 4)),
        broken("it is a Python pickle, and only safetensors is read")),
    "old .pt": Bad(holds(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."),
        broken("it is a Python pickle, and only safetensors is read")),
    "GGUF": Bad(holds(b"GGUF\x03" + bytes(100)), broken("it is a GGUF file, and only safetensors is read")),
    "HDF5": Bad(holds(b"\x89HDF\r\n\x1a\n" + bytes(100)), broken("it is an HDF5 file, and only safetensors is read")),
    "gzip": Bad(holds(b"\x1f\x8b\x08\x00" + bytes(100)), broken("it is compressed")),
    "random": Bad(holds(bytes(range(100, 200))),
        broken("it would have a header of 7,740,114,806,721,897,828 bytes, in a file of 100")),
    # ------------------------------------------------------------------------------------------------- a damaged header
    "truncated": Bad(content(lambda data: data[:-1]), broken("it is cut off after 345,559 of 345,560 bytes")),
    "truncated in the header": Bad(content(lambda data: data[:300]),
        broken("it would have a header of 6,752 bytes, in a file of 300")),
    "trailing byte": Bad(content(lambda data: data + b"x"), broken("it goes on for 1 byte after its last tensor")),
    "header longer than the file": Bad(content(lambda data: len(data).to_bytes(8, "little") + data[8:]),
        broken("it would have a header of 345,560 bytes, in a file of 345,560")),
    "header of gigabytes": Bad(content(lambda data: (2**33).to_bytes(8, "little") + data[8:]),
        broken("it would have a header of 8,589,934,592 bytes, in a file of 345,560")),
    "header of exabytes": Bad(content(lambda data: b"\xff" * 8 + data[8:]),
        broken("it would have a header of 18,446,744,073,709,551,615 bytes, in a file of 345,560")),
    "header of 100 MB that is there": Bad(instead(str(WEIGHTS), sparse(100_000_000)),
        broken("it would have a header of 99,999,992 bytes, in a file of 100,000,000; at most 10,000,000 are read")),
    "header not JSON": Bad(content(lambda data: data[:8] + b"x" + data[9:]),
        broken("its header cannot be read as JSON: Expecting value: line 1 column 1 (char 0)")),
    "header a list": Bad(holds(with_header(b"[]")), broken("its header is not a JSON object")),
    "header not UTF-8": Bad(holds(with_header(b'{"\xff": 1}')),
        broken("its header cannot be read as JSON: 'utf-8' codec can't decode byte 0xff in position 2: "
        "invalid start byte")),
    "header in UTF-16": Bad(holds(with_header('{"a": 1}'.encode("utf-16"))),
        broken("its header cannot be read as JSON: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte")),
    "header nested deeply": Bad(holds(with_header(DEEP.encode())),
        broken("its header cannot be read as JSON: it is nested too deeply")),
    "metadata no texts": Bad(header(lambda entries: entries.update(__metadata__={"format": 1})),
        broken("its metadata are no table of texts")),
    "duplicate names": Bad(holds(with_header(b'{"a": 1, "b": 2, "a": 1}')),
        broken("its header cannot be read as JSON: 'a' stands in it twice")),
    "entry of text": Bad(header(lambda entries: entries.update({Q: "here"})),
        broken(f"its header's entry of {Q} is unusable")),
    "no offsets": Bad(header(lambda entries: entries[Q].pop("data_offsets")),
        broken(f"its header's entry of {Q} is unusable")),
    "three offsets": Bad(entry(data_offsets=[0, 1, 2]), broken(f"its header's entry of {Q} is unusable")),
    "negative offsets": Bad(entry(data_offsets=[-8, 8]), broken(f"its header's entry of {Q} is unusable")),
    "offsets of text": Bad(entry(data_offsets=["0", "8"]), broken(f"its header's entry of {Q} is unusable")),
    "offsets beyond 64 bits": Bad(entry(data_offsets=[0, 2**64]), broken(f"its header's entry of {Q} is unusable")),
    "no shape": Bad(entry(shape=None), broken(f"its header's entry of {Q} is unusable")),
    "negative shape": Bad(entry(shape=[-60, -48]), broken(f"its header's entry of {Q} is unusable")),
    "true in a shape": Bad(entry(shape=[True, 2880]), broken(f"its header's entry of {Q} is unusable")),
    "1e400 in a shape": Bad(holds(with_header(b'{"a": {"shape": [1e400]}}')),
        broken("its header cannot be read as JSON: 1e400 is too large a number")),
    "a thousand dimensions": Bad(entry(shape=[1] * 1000), broken(f"its header's entry of {Q} is unusable")),
    "empty and too large": Bad(entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0]),
        broken(f"{Q}: F32 [0, 1099511627776, 1099511627776]")),
    "dtype a number": Bad(entry(dtype=32), broken(f"its header's entry of {Q} is unusable")),
    "dtype unknown": Bad(entry(dtype="F4"),
        f"m/model.safetensors: {Q} holds numbers of a kind that NumPy lacks; download the checkpoint again"),
    "dtype of another size": Bad(entry(dtype="F64"), broken(f"{Q}: F64 [60, 48] in 11520 bytes")),
    "shape of another size": Bad(entry(shape=[7]), broken(f"{Q}: F32 [7] in 11520 bytes")),
    "overlapping": Bad(header(lambda entries: entries[Q].update(data_offsets=entries[K]["data_offsets"], shape=[10])),
        broken(f"its tensors overlap, or leave a gap: {Q} lies from byte 38,127 to 38,167, the one "
        "before it to 38,167")),
    "gap": Bad(header(lambda entries: entries.pop(K)),
        broken("its tensors overlap, or leave a gap: model.layers.1.self_attn.k_proj.weight lies from byte 38,064 to "
        "41,904, the one before it to 38,024")),
    "outside the file": Bad(entry(data_offsets=[10**9, 10**9 + 11520]),
        broken("its tensors overlap, or leave a gap: model.layers.1.self_attn.v_proj.weight lies from byte 65,101 to "
        "68,941, the one before it to 53,581")),
    "backwards": Bad(holds(with_header(json.dumps(BACKWARDS).encode(), bytes(8))),
        broken("its tensors overlap, or leave a gap: b lies from byte 147 to 139, the one before it to 147")),
    # ------------------------------------------------------------------------------------------ tensors that do not fit
    "zero tensors": Bad(holds(with_header(b"{}")), f"m: has no tensor {Q}; is the checkpoint complete?"),
    "tensor of size zero": Bad(tensor(np.zeros((0, 48), np.float32)),
        "m, layer 1: q_proj.weight has shape [0, 48], expected [60, 48] = [NH, D]; head_dim (H) is a size of its "
        "own, not hidden_size / num_attention_heads"),
    "wrong shape": Bad(tensor(np.ones((48, 48), np.float32)),
        "m, layer 1: q_proj.weight has shape [48, 48], expected [60, 48] = [NH, D]; head_dim (H) is a size of "
        "its own, not hidden_size / num_attention_heads"),
    "transposed": Bad(tensor(np.ones((48, 60), np.float32)),
        "m, layer 1: q_proj.weight has shape [48, 60], expected [60, 48] = [NH, D]; head_dim (H) is a size of "
        "its own, not hidden_size / num_attention_heads"),
    "norm of another size": Bad(tensor(np.ones(60, np.float32), K),
        "m, layer 1: k_norm.weight has shape [60], expected [10] = [H]"),
    "norm with an axis too many": Bad(tensor(np.ones((1, 10), np.float32), K),
        "m, layer 1: k_norm.weight has shape [1, 10], expected [10] = [H]"),
    "NaN": Bad(tensor(holed(np.nan).astype(np.float32)),
        "m, layer 1: q_proj.weight has 2 of 2880 values that are NaN, infinite or beyond float32, the first "
        "(nan) at [3, 4]; repair the file"),
    "infinity": Bad(tensor(holed(-np.inf).astype(np.float16)),
        "m, layer 1: q_proj.weight has 2 of 2880 values that are NaN, infinite or beyond float32, the first "
        "(-inf) at [3, 4]; repair the file"),
    "beyond float32": Bad(tensor(holed(1e300)),
        "m, layer 1: q_proj.weight has 2 of 2880 values that are NaN, infinite or beyond float32, the first "
        "(1e+300) at [3, 4]; repair the file"),
    "integers": Bad(tensor(np.ones((60, 48), np.int8)),
        "m, layer 1: q_proj.weight holds int8 numbers; expected one of float16, bfloat16, float32, float64"),
    "booleans": Bad(tensor(np.ones((60, 48), bool)),
        "m, layer 1: q_proj.weight holds bool numbers; expected one of float16, bfloat16, float32, float64"),
    "fp8": Bad(header(lambda entries: entries[Q].update(dtype="F8_E4M3", shape=[60, 192])),
        "m, layer 1: q_proj.weight holds float8_e4m3fn numbers; expected one of float16, bfloat16, float32, float64"),
    "complex": Bad(header(lambda entries: entries[Q].update(dtype="C64", shape=[30, 48])),
        f"m/model.safetensors: {Q} holds numbers of a kind that NumPy lacks; download the checkpoint again"),
    "missing": Bad(tensors(missing(Q)), f"m: has no tensor {Q}; is the checkpoint complete?"),
    "renamed": Bad(tensors(renamed(Q, Q + "s")), f"m: has no tensor {Q}; it has " f"{Q}s, which is another name"),
    "layers.10 is not layers.1": Bad(tensors(lambda arrays: [arrays.pop(n) for n in [*arrays] if ".1." in n]),
        f"m: has no tensor {Q}; is the checkpoint complete?"),
    "extra": Bad(tensor(np.ones(60, np.float32), Q.replace("weight", "bias")),
        "m: also has model.layers.1.self_attn.q_proj.bias, which a layer of this config.json has not, and "
        "Hugging Face would leave out; is config.json this model's?"),
    "a name that clears the screen": Bad(header(lambda entries: entries.update({"\x1b[2J\n": 1})),
        broken("its header's entry of \\x1b[2J is unusable")),
    # ------------------------------------------------------------------------------------------- shards and their index
    "no weights": Bad(without(WEIGHTS),
        "m: has neither model.safetensors nor model.safetensors.index.json, and only safetensors is read; "
        "download the checkpoint again"),
    "pickled weights only": Bad(after(lambda: WEIGHTS.rename("m/pytorch_model.bin")),
        "m: has neither model.safetensors nor model.safetensors.index.json, and only safetensors is read; "
        "download the checkpoint again"),
    "index not JSON": Bad(index("?"),
        "m/model.safetensors.index.json cannot be read as JSON: Expecting value: line 1 column 1 (char 0); "
        "download the checkpoint again"),
    "index a list": Bad(index([]),
        "m/model.safetensors.index.json is not a JSON object; download the checkpoint again"),
    "index without a map": Bad(index({}),
        "m/model.safetensors.index.json: has no weight_map from tensors to files; download the checkpoint again"),
    "index with numbers": Bad(index({"weight_map": {Q: 1}}),
        "m/model.safetensors.index.json: has no weight_map from tensors to files; download the checkpoint again"),
    "index names a tensor twice": Bad(index(f'{{"weight_map": {{"{Q}": "a", "{Q}": "b"}}}}'),
        f"m/model.safetensors.index.json cannot be read as JSON: '{Q}' stands in it twice; download the "
        "checkpoint again"),
    "index lacks the layer": Bad(index({"weight_map": {}}), f"m: has no tensor {Q}; is the checkpoint complete?"),
    "shard missing": Bad(shard("gone.safetensors"),
        f"m/gone.safetensors: missing, it should hold {Q}; download the checkpoint again"),
    "shard lacks it": Bad(shard("other.safetensors", lambda path: save_file(OUTPUT, path)),
        f"m/other.safetensors: not a readable safetensors file of this model: it lacks {Q}; download the "
        "checkpoint again"),
    "shard in the folder above": Bad(shard("../w/seeded-0.safetensors"),
        f"m/model.safetensors.index.json: says that {Q} lies in '../w/seeded-0.safetensors', which is no "
        "safetensors file beside it; download the checkpoint again"),
    "shard at an absolute path": Bad(shard("/etc/x.safetensors"),
        f"m/model.safetensors.index.json: says that {Q} lies in '/etc/x.safetensors', which is no safetensors "
        "file beside it; download the checkpoint again"),
    "shard in a folder below": Bad(shard("a/x.safetensors"),
        f"m/model.safetensors.index.json: says that {Q} lies in 'a/x.safetensors', which is no safetensors file "
        "beside it; download the checkpoint again"),
    "shard with a drive's letter": Bad(shard("C:x.safetensors"),
        f"m/model.safetensors.index.json: says that {Q} lies in 'C:x.safetensors', which is no safetensors file "
        "beside it; download the checkpoint again"),
    "shard that is a pickle": Bad(shard("pytorch_model.bin"),
        f"m/model.safetensors.index.json: says that {Q} lies in 'pytorch_model.bin', which is no safetensors file "
        "beside it; download the checkpoint again"),
    "shard a folder": Bad(shard("x.safetensors", Path.mkdir),
        "m/x.safetensors: a folder or a device, where a file should be; download the checkpoint again"),
    "shard a link to nothing": Bad(shard("x.safetensors", lambda path: path.symlink_to("nothing")),
        f"m/x.safetensors: missing, it should hold {Q}; download the checkpoint again"),
    "shard a link to itself": Bad(shard("x.safetensors", lambda path: path.symlink_to("x.safetensors")),
        f"m/x.safetensors: missing, it should hold {Q}; download the checkpoint again"),
    "shard a link to a pickle outside": Bad(shard("x.safetensors", linked),
        "m/x.safetensors: not a readable safetensors file (it is a zip archive, as .npz, .pt and .bin files are, "
        "and only safetensors is read); download the checkpoint again"),
    "shard a link to a device": Bad(shard("x.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "m/x.safetensors: a folder or a device, where a file should be; download the checkpoint again"),
    "shard a pipe": Bad(shard("x.safetensors", os.mkfifo),
        "m/x.safetensors: a folder or a device, where a file should be; download the checkpoint again"),
    # ------------------------------------------------------------------------------------------------------ config.json
    "config missing": Bad(without("m/config.json"),
        "m: no Hugging Face checkpoint, it has no config.json; download the checkpoint again"),
    "config a folder": Bad(instead("m/config.json", Path.mkdir),
        "m/config.json: a folder or a device, where a file should be; download the checkpoint again"),
    "config a pipe": Bad(instead("m/config.json", os.mkfifo),
        "m/config.json: a folder or a device, where a file should be; download the checkpoint again"),
    "config a link to a device": Bad(instead("m/config.json", lambda path: path.symlink_to("/dev/zero")),
        "m/config.json: a folder or a device, where a file should be; download the checkpoint again"),
    "config of 200 MB": Bad(instead("m/config.json", sparse(200_000_000)),
        "m/config.json: 200,000,000 bytes, of which at most 100,000,000 are read; download the checkpoint again"),
    "config not JSON": Bad(holds("{", "m/config.json"),
        no_json("Expecting property name enclosed in double quotes: line 1 column 2 (char 1)")),
    "config empty": Bad(holds("", "m/config.json"), no_json("Expecting value: line 1 column 1 (char 0)")),
    "config a list": Bad(holds("[]", "m/config.json"),
        "m/config.json is not a JSON object; download the checkpoint again"),
    "config not UTF-8": Bad(holds(b"\xff\xfe{}", "m/config.json"),
        no_json("'utf-8' codec can't decode byte 0xff in position 0: invalid start byte")),
    "config with a byte order mark": Bad(holds(b"\xef\xbb\xbf{}", "m/config.json"),
        no_json("Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)")),
    "config nested deeply": Bad(field(f'"a": {DEEP}'), no_json("it is nested too deeply")),
    "config nested a hundred times": Bad(field(f'"a": {"[" * 100}{"]" * 100}'), no_json("it is nested too deeply")),
    "config names a field twice": Bad(field('"head_dim": 12'), no_json("'head_dim' stands in it twice")),
    "NaN in config": Bad(field('"a": NaN'), no_json("NaN is no JSON number")),
    "1e400 in config": Bad(field('"a": 1e400'), no_json("1e400 is too large a number")),
    "5,000 digits in config": Bad(field(f'"a": {"9" * 5000}'), no_json("a number of 5,000 digits is too large")),
    "another model": Bad(config(model_type="llama"),
        "m/config.json: model_type is 'llama'; only 'qwen3' layers can be compared"),
    "no model type": Bad(config(model_type=...),
        "m/config.json: model_type is None; only 'qwen3' layers can be compared"),
    "head_dim left out": Bad(config(head_dim=...),
        "m, layer 1 (config.json has no head_dim, which is then 128): q_proj.weight has shape [60, 48], expected "
        "[768, 48] = [NH, D]; head_dim (H) is a size of its own, not hidden_size / num_attention_heads"),
    "head_dim from the width": Bad(config(head_dim=8),
        "m, layer 1: q_proj.weight has shape [60, 48], expected [48, 48] = [NH, D]; head_dim (H) is a size of "
        "its own, not hidden_size / num_attention_heads"),
    "head_dim null": Bad(config(head_dim=None), unusable("head_dim is None; it must be a whole number of at least 1")),
    "head_dim odd": Bad(config(head_dim=9),
        unusable("head_dim is 9; rotary embedding turns pairs, so it must be even")),
    "size of text": Bad(config(hidden_size="48"),
        unusable("hidden_size is '48'; it must be a whole number of at least 1")),
    "size true": Bad(config(num_key_value_heads=True),
        unusable("num_key_value_heads is True; it must be a whole number of at least 1")),
    "size with a fraction": Bad(config(hidden_size=48.5),
        unusable("hidden_size is 48.5; it must be a whole number of at least 1")),
    "no heads": Bad(config(num_attention_heads=0),
        unusable("num_attention_heads is 0; it must be a whole number of at least 1")),
    "heads that do not divide": Bad(config(num_key_value_heads=4),
        unusable("num_attention_heads 6 is not a multiple of num_key_value_heads 4")),
    "layers of text": Bad(config(num_hidden_layers="11"),
        "m/config.json: num_hidden_layers is '11'; it must be a whole number from 1 to 10,000"),
    "10^12 layers, all of them": Bad(config(["--weights", "m", "--layer", "all"], num_hidden_layers=10**12),
        "m/config.json: num_hidden_layers is 1000000000000; it must be a whole number from 1 to 10,000"),
    "theta null": Bad(config(rope_theta=None), unusable("rope_theta is None; it must be a number")),
    "theta of text": Bad(config(rope_theta="50000"), unusable("rope_theta is '50000'; it must be a number")),
    "theta true": Bad(config(rope_theta=True), unusable("rope_theta is True; it must be a number")),
    "theta negative": Bad(config(rope_theta=-1), "m/config.json: rope_theta is -1; it must be a number of at least 1"),
    "theta nearly zero": Bad(config(rope_theta=5e-324),
        "m/config.json: rope_theta is 5e-324; it must be a number of at least 1"),
    "eps false": Bad(config(rms_norm_eps=False), unusable("rms_norm_eps is False; it must be a number")),
    "eps of text": Bad(config(rms_norm_eps="1e-6"), unusable("rms_norm_eps is '1e-6'; it must be a number")),
    "eps negative": Bad(config(rms_norm_eps=-1e-6), unusable("rms_norm_eps is -1e-06; it must be in [0, 1)")),
    "RoPE of another type": Bad(config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        unsupported("RoPE of the type 'yarn'")),
    "RoPE of another type, new form": Bad(config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        unsupported("RoPE of the type 'linear'")),
    "RoPE for each type of layer": Bad(config(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        unsupported("RoPE that differs from layer to layer")),
    "RoPE of text": Bad(config(rope_scaling="default"),
        "m/config.json: the RoPE parameters are 'default'; expected an object"),
    "RoPE a list": Bad(config(rope_parameters=[1e4]),
        "m/config.json: the RoPE parameters are [10000.0]; expected an object"),
    "RoPE's type a number": Bad(config(rope_scaling={"rope_type": 1}), unsupported("RoPE of the type 1")),
    "RoPE on a part": Bad(config(partial_rotary_factor=0.5),
        unsupported("RoPE on a part of each head (partial_rotary_factor)")),
    "quantised": Bad(config(quantization_config={"quant_method": "fp8"}),
        unsupported("quantised weights (quantization_config)")),
    "sliding by layer_types": Bad(config(use_sliding_window=True, layer_types=SLIDING),
        unsupported("layer 1 of the type 'sliding_attention'")),
    "sliding by number": Bad(config(use_sliding_window=True, max_window_layers=1),
        unsupported("layer 1 with a sliding window")),
    "layer_types too short": Bad(config(layer_types=["full_attention"]),
        unsupported("layer_types without one entry for each layer")),
    "layer_types of text": Bad(config(layer_types="full_attention"),
        unsupported("layer_types without one entry for each layer")),
    # ----------------------------------------------------------------------------------------- an exported case's files
    "no such file": Bad(plain("--weights", "nowhere/at-all"), "nowhere/at-all: no such file"),
    "neither file nor folder": Bad(after(lambda: os.mkfifo("pipe"), ["--weights", "pipe"]),
        "pipe: neither a folder nor a file; give a checkpoint folder or an exported .safetensors file"),
    "a folder without a checkpoint": Bad(plain("--weights", "w"),
        "w: no Hugging Face checkpoint, it has no config.json; download the checkpoint again"),
    "a file of a checkpoint": Bad(plain("--weights", "m/model.safetensors"),
        "m/model.safetensors: a checkpoint's file; give the checkpoint's directory"),
    "a config in place of weights": Bad(plain("--weights", "m/config.json"),
        "m/config.json: not a readable safetensors file (it is JSON text); export it again"),
    "file empty": Bad(holds("", W, CASE),
        "w/seeded-0.safetensors: not a readable safetensors file (it is empty); export it again"),
    "file a Git LFS pointer": Bad(holds(LFS, W, CASE),
        "w/seeded-0.safetensors: not a readable safetensors file (it is a Git LFS pointer in place of the file; "
        "run: git lfs pull); export it again"),
    "file truncated": Bad(content(lambda data: data[:-1], W, CASE),
        "w/seeded-0.safetensors: not a readable safetensors file (it is cut off after 31,583 of 31,584 bytes); "
        "export it again"),
    "file with a tensor twice": Bad(holds(with_header(b'{"a": 1, "a": 1}'), W, CASE),
        "w/seeded-0.safetensors: not a readable safetensors file (its header cannot be read as JSON: 'a' stands "
        "in it twice); export it again"),
    "file with a dtype unknown": Bad(header(lambda entries: entries["k_norm.weight"].update(dtype="F4"), W, CASE),
        "w/seeded-0.safetensors: k_norm.weight holds numbers of a kind that NumPy lacks; export it again"),
    "file lacks a weight": Bad(exported(missing("k_norm.weight")),
        "w/seeded-0.safetensors: lacks k_norm.weight; expected exactly k_norm.weight, k_proj.weight, "
        "o_proj.weight, q_norm.weight, q_proj.weight, v_proj.weight; export it again"),
    "file has a weight renamed": Bad(exported(renamed("k_norm.weight", "k_norm.weights")),
        "w/seeded-0.safetensors: lacks k_norm.weight (it holds k_norm.weights); expected exactly k_norm.weight, "
        "k_proj.weight, o_proj.weight, q_norm.weight, q_proj.weight, v_proj.weight; export it again"),
    "file has a weight too many": Bad(exported(lambda arrays: arrays.update({"q_proj.zeros": np.ones(60)})),
        "w/seeded-0.safetensors: also holds q_proj.zeros; expected exactly k_norm.weight, k_proj.weight, "
        "o_proj.weight, q_norm.weight, q_proj.weight, v_proj.weight; export it again"),
    "file with integers": Bad(exported(lambda arrays: arrays.update({"q_norm.weight": np.ones(10, np.int32)})),
        "w/seeded-0.safetensors: q_norm.weight holds int32 numbers; expected one of float16, bfloat16, float32, "
        "float64"),
    "file with NaN": Bad(exported(lambda arrays: arrays["v_proj.weight"].fill(np.nan)),
        "w/seeded-0.safetensors: v_proj.weight has 960 of 960 values that are NaN, infinite or beyond float32, "
        "the first (nan) at [0, 0]; repair the file"),
    "file without config": Bad(metadata("config", None),
        "w/seeded-0.safetensors: metadata 'config' is missing; write the file with python -m harness.export"),
    "file without source": Bad(metadata("source", None),
        "w/seeded-0.safetensors: metadata 'source' is missing; write the file with python -m harness.export"),
    "file's config not JSON": Bad(metadata("config", "{head_dim: 3"),
        "w/seeded-0.safetensors: metadata 'config' cannot be read as JSON: Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1); export it again"),
    "file's source a list": Bad(metadata("source", "[1]"),
        "w/seeded-0.safetensors: metadata 'source' is not a JSON object; export it again"),
    "file's config lacks a field": Bad(metadata("config", {"head_dim": ...}),
        "w/seeded-0.safetensors: the configuration lacks head_dim"),
    "file's config of another model": Bad(metadata("config", {"model_type": "llama"}),
        "w/seeded-0.safetensors: model_type is 'llama'; only 'qwen3' layers can be compared"),
    "file's theta NaN": Bad(metadata("config", {"rope_theta": np.nan}),
        "w/seeded-0.safetensors: metadata 'config' cannot be read as JSON: NaN is no JSON number; export it again"),
    "file of an unknown kind": Bad(metadata("source", {"kind": "found"}),
        "w/seeded-0.safetensors: metadata 'source' does not say kind (seeded, checkpoint, hub) and layer; export "
        "it again"),
    "file without a layer": Bad(metadata("source", {"layer": ...}),
        "w/seeded-0.safetensors: metadata 'source' does not say kind (seeded, checkpoint, hub) and layer; export "
        "it again"),
    "file's layer of text": Bad(metadata("source", {"layer": "0"}),
        "w/seeded-0.safetensors: metadata 'source' has layer '0', not a whole number; export it again"),
    "file's seed below zero": Bad(metadata("source", {"seed": -1}),
        "w/seeded-0.safetensors: metadata 'source' has seed -1, not a whole number; export it again"),
    "file's model a list": Bad(metadata("source", {"model": []}),
        "w/seeded-0.safetensors: metadata 'source' has model [], not a text; export it again"),
    "one input of two": Bad(without("w/seeded-0.stress.safetensors", CASE),
        "w/seeded-0.stress.safetensors: missing, though the other input is there; --seed 0 makes both anew"),
    "input a folder": Bad(instead(CHAPTER, Path.mkdir, CASE),
        "w/seeded-0.chapter.safetensors: a folder or a device, where a file should be; export it again"),
    "input a pipe": Bad(instead(CHAPTER, os.mkfifo, CASE),
        "w/seeded-0.chapter.safetensors: a folder or a device, where a file should be; export it again"),
    "input truncated": Bad(content(lambda data: data[:-1], CHAPTER, CASE),
        "w/seeded-0.chapter.safetensors: not a readable safetensors file (it is cut off after 5,975 of 5,976 "
        "bytes); export it again"),
    "input lacks a table": Bad(exported(missing("sin"), CHAPTER),
        "w/seeded-0.chapter.safetensors: lacks sin; expected exactly cos, d_output, hidden_states, sin; export "
        "it again"),
    "input of another width": Bad(exported(lambda arrays: arrays.update(hidden_states=np.ones((1, 12, 40))), CHAPTER),
        "w/seeded-0.chapter.safetensors: hidden_states has shape [1, 12, 40], expected [1, 12, 48]"),
    "input of another length": Bad(exported(lambda arrays: arrays.update(hidden_states=np.ones((1, 6, 48))), CHAPTER),
        "w/seeded-0.chapter.safetensors: cos has shape [1, 12, 10], expected [1, 6, 10]"),
    "input without a batch": Bad(exported(lambda arrays: arrays.update(hidden_states=np.ones((12, 48))), CHAPTER),
        "w/seeded-0.chapter.safetensors: hidden_states has shape [12, 48]; expected [B, T, D]"),
    "input a number": Bad(exported(lambda arrays: arrays.update(hidden_states=np.ones(())), CHAPTER),
        "w/seeded-0.chapter.safetensors: hidden_states has shape []; expected [B, T, D]"),
    "input without tokens": Bad(exported(lambda arrays: arrays.update(hidden_states=np.ones((1, 0, 48))), CHAPTER),
        "w/seeded-0.chapter.safetensors: hidden_states has shape [1, 0, 48]; expected [B, T, D]"),
    "input with half a table": Bad(exported(lambda arrays: arrays.update(cos=np.ones((1, 12, 5))), CHAPTER),
        "w/seeded-0.chapter.safetensors: cos has shape [1, 12, 5], expected [1, 12, 10]"),
    "input with NaN": Bad(exported(lambda arrays: arrays["d_output"].fill(np.nan), CHAPTER),
        "w/seeded-0.chapter.safetensors: d_output has 576 of 576 values that are NaN, infinite or beyond "
        "float32, the first (nan) at [0, 0, 0]; repair the file"),
    "input without source": Bad(metadata("source", None, CHAPTER),
        "w/seeded-0.chapter.safetensors: metadata 'source' is missing; write the file with python -m harness.export"),
    "input for another theta": Bad(metadata("source", {"theta": 1e4}, CHAPTER),
        "w/seeded-0.chapter.safetensors: made for theta 10000.0, the layer has 1000000.0; export it again"),
    "input's seed of text": Bad(metadata("source", {"seed": "0"}, CHAPTER),
        "w/seeded-0.chapter.safetensors: made from the seed '0', which is none; export it again"),
    "input's tokens of another number": Bad(metadata("source", {"tokens": ["a", "b"]}, CHAPTER),
        "w/seeded-0.chapter.safetensors: metadata 'source' has other tokens than one text for each position; "
        "export it again"),
    "input's padding of another number": Bad(metadata("source", {"left_pad": [3]}, CHAPTER),
        "w/seeded-0.chapter.safetensors: metadata 'source' has another left_pad than attention_mask; export it again"),
    "input's mask of halves": Bad(exported(lambda arrays: arrays.update(attention_mask=np.full((1, 12), 0.5)), CHAPTER),
        "w/seeded-0.chapter.safetensors: attention_mask must be 1 for a token and 0 for padding, with a token in "
        "each sequence"),
    "input's gradient at padding": Bad(exported(lambda arrays: arrays.update(attention_mask=HALF), CHAPTER),
        "w/seeded-0.chapter.safetensors: d_output is not 0 at padding that sees no token; its output means nothing"),
    # -------------------------------------------------------------------------------------------------------- arguments
    "padding of text": Bad(plain("--left-pad", "two"),
        "argument --left-pad: 'two' is no whole number; --help lists the arguments"),
    "padding of another number than the batch": Bad(plain("--left-pad", "1", "--batch", "2"),
        "--left-pad has 1 numbers and --batch is 2; give one for each sequence"),
    "padding of every token": Bad(plain("--left-pad", "0", "12"),
        "--left-pad is 0 12; of 12 tokens 0 to 11 can be padding"),
    "padding below zero": Bad(plain("--left-pad", "-1"), "--left-pad is -1; of 12 tokens 0 to 11 can be padding"),
    "unknown flag": Bad(plain("--wieghts", "m"),
        "unrecognized arguments: --wieghts m; did you mean --weights? --help lists the arguments"),
    "flag without a value": Bad(plain("--weights"),
        "argument --weights: expected one argument; --help lists the arguments"),
    "word without a flag": Bad(plain("m"), "unrecognized arguments: m; --help lists the arguments"),
    "layer of text": Bad(plain("--layer", "two"),
        "argument --layer: 'two' is no whole number; --help lists the arguments"),
    "layer below zero": Bad(plain("--weights", "m", "--layer", "-1"),
        "m/config.json: the model has layers 0 to 10; --layer -1 is not among them"),
    "layer too large": Bad(plain("--weights", "m", "--layer", "0", "11"),
        "m/config.json: the model has layers 0 to 10; --layer 11 is not among them"),
    "layer twice": Bad(plain("--weights", "m", "--layer", "1", "1"), "--layer 1: named twice"),
    "layer all and another": Bad(plain("--weights", "m", "--layer", "all", "0"),
        "--layer all: names every layer; leave out the others"),
    "layer of the seeded case": Bad(plain("--layer", "1"),
        "--layer 1: the seeded weights are one layer, number 0; --weights chooses a checkpoint"),
    "another layer than the file's": Bad(plain(*CASE, "--layer", "1"),
        "--layer 1: w/seeded-0.safetensors holds layer 0; leave --layer out or give the checkpoint"),
    "batch of text": Bad(plain("--batch", "two"),
        "argument --batch: 'two' is no whole number; --help lists the arguments"),
    "batch with a fraction": Bad(plain("--batch", "1.5"),
        "argument --batch: '1.5' is no whole number; --help lists the arguments"),
    "batch 0": Bad(plain("--batch", "0"), "--batch is 0; it must be at least 1"),
    "no tokens": Bad(plain("--seq-len", "0"), "--seq-len is 0; it must be at least 1"),
    "tokens below zero": Bad(plain("--seq-len", "-1"), "--seq-len is -1; it must be at least 1"),
    "more tokens than an input holds": Bad(plain("--batch", "2", "--seq-len", str(10**19)),
        "--batch 2 and --seq-len 10000000000000000000 make 20000000000000000000 tokens; an input holds at most "
        "1048576"),
    "seed of text": Bad(plain("--seed", "text"),
        "argument --seed: 'text' is no whole number; --help lists the arguments"),
    "seed below zero": Bad(plain("--seed", "-1"), "--seed is -1; it must be at least 0"),
    "weights and model": Bad(plain("--model", "some/model", "--weights", "m"),
        "--model and --weights: both choose the weights; give one of them"),
    "revision without a model": Bad(plain("--revision", "main"), "--revision is one of --model; give that too"),
    "text without a model": Bad(plain("--text", "words"),
        "--text needs a model's tokenizer; give --model, or a checkpoint directory by --weights"),
    "text without layer 0": Bad(plain(*M, "--text", "words"), "--text is what layer 0 is fed; give --layer 0, too"),
    "text without a tokenizer": Bad(plain("--weights", "m", "--text", "words"),
        "m: has no tokenizer.json, which --text needs; download the checkpoint again"),
    "dtype without a kit": Bad(plain(*CASE, "--dtype", "float32"), "--dtype is one of --case; give that too"),
    "dtype unknown to the kit": Bad(plain(*CASE, "--case", "kit", "--dtype", "int8"),
        "argument --dtype: invalid choice: 'int8' (choose from …); --help lists the arguments"),
    "no such implementation": Bad(plain("--impl", "numpi"),
        "--impl numpi: no such implementation; there are … (--list shows the planted bugs, too); your own is "
        "given by --candidate. Did you mean numpy?", compare.main),
    "no such bug": Bad(plain("--impl", "numpy:eps_1e-3"),
        "--impl numpy:eps_1e-3: no such implementation; there are … (--list shows the planted bugs, too); your "
        "own is given by --candidate. Did you mean numpy:eps_1e-8?", compare.main),
    "bug without a name": Bad(plain("--impl", "numpy:"),
        "--impl numpy:: no such implementation; there are … (--list shows the planted bugs, too); your own is "
        "given by --candidate. Did you mean numpy?", compare.main),
    "implementation twice": Bad(plain("--impl", "numpy", "numpy"), "--impl numpy: named twice", compare.main),
    "no implementation": Bad(plain("--impl"),
        "argument --impl: expected at least one argument; --help lists the arguments", compare.main),
    "unknown RoPE": Bad(plain("--rope", "yarn"),
        "argument --rope: invalid choice: 'yarn' (choose from …); --help lists the arguments", compare.main),
    "unknown dtype": Bad(plain("--dtype", "int8"),
        "argument --dtype: invalid choice: 'int8' (choose from …); --help lists the arguments", compare.main),
    "unknown device": Bad(plain("--device", "tpu"),
        "argument --device: invalid choice: 'tpu' (choose from …); --help lists the arguments", compare.main),
    "no GPU": Bad(plain(*CASE, "--device", "gpu", "--impl", "torch"),
        "--device gpu: … sees no GPU on this machine; use --device cpu or auto", compare.main),
    "layer twice, compared": Bad(plain("--layer", "1", "1"), "--layer 1: named twice", compare.main),
    "batch 0, compared": Bad(plain(*CASE, "--impl", "numpy", "--batch", "0"),
        "--batch is 0; it must be at least 1", compare.main),
    "more tokens than an input holds, compared": Bad(plain("--seq-len", "10000000", "--impl", "numpy"),
        "--batch 1 and --seq-len 10000000 make 10000000 tokens; an input holds at most 1048576", compare.main),
    "no time": Bad(plain("--time-limit", "0"), "--time-limit is 0; it must be above 0", compare.main),
    "time of text": Bad(plain("--time-limit", "soon"),
        "argument --time-limit: invalid float value: 'soon'; --help lists the arguments", compare.main),
    "memory not a number": Bad(plain("--memory-limit", "nan"),
        "--memory-limit is nan; it must be above 0", compare.main),
    "misspelt flag, compared": Bad(plain("--sed", "1"),
        "unrecognized arguments: --sed 1; did you mean --seed? --help lists the arguments", compare.main),
    "JSON into a folder": Bad(plain("--json", "m"),
        "--json m: a folder; name a file, or - for standard output", compare.main),
    "weights that are none, compared": Bad(holds(LFS, W, [*CASE, "--impl", "numpy"]),
        "w/seeded-0.safetensors: not a readable safetensors file (it is a Git LFS pointer in place of the file; "
        "run: git lfs pull); export it again", compare.main),
    # ------------------------------------------------------------------------------------------------ your own function
    "candidate without a function": Bad(port("port.py"),
        "--candidate port.py: expected path/to/file.py:function or package.module:function", compare.main),
    "candidate in our name": Bad(port("torch:f"),
        "--candidate torch:f: expected path/to/file.py:function or package.module:function", compare.main),
    "candidate's file missing": Bad(port("gone.py:output"),
        "--candidate gone.py:output: there is no file gone.py", compare.main),
    "candidate twice": Bad(lambda: [*port("port.py:output")(), "--candidate", "port.py:output"],
        "--candidate port.py:output: named twice", compare.main),
    "candidate's function misspelt": Bad(port("port.py:outptu"),
        "--candidate port.py:outptu: port.py has no function outptu; did you mean output?", compare.main),
    "candidate no function": Bad(port("port.py:NUMBER"),
        "--candidate port.py:NUMBER: port.py has no function NUMBER", compare.main),
    "candidate's module missing": Bad(port("no.such.module:f"),
        "--candidate no.such.module:f: there is no module no; give a file (port.py:f) or install it", compare.main),
    # ----------------------------------------------------------------------------------------------------- saved traces
    "trace missing": Bad(plain("--trace", "gone.safetensors"),
        "--trace gone.safetensors: no such file or folder", compare.main),
    "trace folder empty": Bad(trace("notes.txt", b"", "answers"),
        "--trace answers: holds no .safetensors file", compare.main),
    "trace of no run": Bad(trace("other.safetensors", [OUTPUT]),
        "--trace answers/other.safetensors: its name is none of this comparison's runs: chapter.neutral.float64, …",
        compare.main),
    "trace no safetensors file": Bad(trace("chapter.model.float32.safetensors", zipped()),
        "answers/chapter.model.float32.safetensors: not a readable safetensors file (it is a zip archive, as "
        ".npz, .pt and .bin files are, and only safetensors is read); write it again", compare.main),
    "trace of integers": Bad(trace("chapter.model.float32.safetensors", [{"output": np.ones((1, 12, 48), np.int64)}]),
        "answers/chapter.model.float32.safetensors: output holds int64 numbers; expected one of float16, bfloat16, "
        "float32, float64", compare.main),
    "trace of another case": Bad(trace("chapter.model.float32.safetensors", [OUTPUT, {"case": "0" * 64}]),
        "--trace answers/chapter.model.float32.safetensors: computed from another case; choose it by the flags "
        "that exported it", compare.main),
    "nothing to judge again": Bad(plain("--rejudge", "m"),
        "--rejudge m: attention_check.json: No such file or directory; give the folder of a run", compare.main),
    "artifact not JSON": Bad(holds("{", ARTIFACT, REJUDGE),
        "--rejudge artifacts/attention_check.json: not an artifact (Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1)); run the comparison again", compare.main),
    "artifact a list": Bad(holds("[]", ARTIFACT, REJUDGE),
        "--rejudge artifacts/attention_check.json: not an artifact (it holds no JSON object); run the comparison "
        "again", compare.main),
    "artifact a pipe": Bad(instead(ARTIFACT, os.mkfifo, REJUDGE),
        "--rejudge artifacts/attention_check.json: not an artifact (a folder or a device, where a file should "
        "be); run the comparison again", compare.main),
    "artifact of another release": Bad(old(lambda document: document.update(schema_version=2)),
        "--rejudge artifacts/attention_check.json: not an artifact of this release (schema_version is not 1); "
        "run the comparison again", compare.main),
    "artifact lacks a field": Bad(old(lambda document: document.pop("inputs")),
        "--rejudge artifacts/attention_check.json: not an artifact of this release (inputs is missing); run the "
        "comparison again", compare.main),
    "artifact with a row of text": Bad(old(lambda document: document["checks"].append("row")),
        "--rejudge artifacts/attention_check.json: not an artifact of this release (checks[1] is no object); run "
        "the comparison again", compare.main),
    "artifact with a limit of text": Bad(old(lambda document: document["checks"][0].update(limit="1")),
        "--rejudge artifacts/attention_check.json: not an artifact of this release (checks[0].limit is no "
        "number); run the comparison again", compare.main),
    "artifact without checks": Bad(old(lambda document: document.update(checks=[])),
        "--rejudge artifacts: its artifact has no checks of its inputs; run the comparison again", compare.main),
    "artifact of traces elsewhere": Bad(old(lambda document: document.update(traces="../m")),
        "--rejudge artifacts/attention_check.json: not an artifact of this release (traces does not match "
        "^traces(/[\\w-][\\w.-]*)?$); run the comparison again", compare.main),
    "artifact of other weights": Bad(old(lambda document: document.update(OTHER_SHA)),
        "--rejudge artifacts: its traces are of another case; choose it by its run's flags: python -m harness.compare",
        compare.main),
    "artifact of other inputs": Bad(old(lambda document: document["inputs"].pop("stress")),
        "--rejudge artifacts: its traces are of another case; choose it by its run's flags: python -m harness.compare",
        compare.main),
    "artifact of another case": Bad(plain(*REJUDGE),
        "--rejudge artifacts: its traces are of another case; choose it by its run's flags: python -m harness.compare",
        compare.main),
    "artifact without traces": Bad(old(lambda document: document.update(traces="traces")),
        "--rejudge artifacts: there are no traces of layer 0 in traces/; run the comparison again", compare.main),
    "kept trace truncated": Bad(content(lambda data: data[:-1], TRACE, [*REJUDGE, *CASE]),
        "artifacts/traces/before/numpy.layer0.chapter.model.float32.safetensors: not a readable safetensors file "
        "(it is cut off after 2,383 of 2,384 bytes); run the comparison again", compare.main),
    "judged again and run": Bad(plain(*REJUDGE, "--impl", "numpy"),
        "--rejudge judges what its folder holds; leave out --impl", compare.main),
    "judged again in another dtype": Bad(plain(*REJUDGE, "--dtype", "float32", "--rope", "model"),
        "--rejudge judges what its folder holds; leave out --rope, --dtype", compare.main),
    # ------------------------------------------------------------------------------------- where nothing can be written
    "weights not to be read": Bad(locked("m/model.safetensors", 0),
        "m/model.safetensors: cannot be read (Permission denied); make it readable, or give another", under=nobody),
    "config not to be read": Bad(locked("m/config.json", 0),
        "m/config.json: cannot be read (Permission denied); make it readable, or give another", under=nobody),
    "checkpoint not to be entered": Bad(locked("m", 0),
        "m/config.json: cannot be read (Permission denied); make it readable, or give another", under=nobody),
    "file not to be read": Bad(locked(W, 0, CASE),
        "w/seeded-0.safetensors: cannot be read (Permission denied); make it readable, or give another", under=nobody),
    "input not to be read": Bad(locked(CHAPTER, 0, CASE),
        "w/seeded-0.chapter.safetensors: cannot be read (Permission denied); make it readable, or give another",
        under=nobody),
    "folder not to be written": Bad(locked("weights", 0o555),
        "weights/m-layer1.safetensors: cannot be written (Permission denied); choose another directory", under=nobody),
    "results not to be written": Bad(locked("artifacts", 0o555, [*CASE, "--impl", "numpy"]),
        "--out artifacts: cannot be written to (Permission denied); choose another folder", compare.main, nobody),
    "disk full": Bad(plain("--weights", "m", "--layer", "2"),
        "weights/m-layer2.safetensors: cannot be written (File too large); choose another directory", under=full_disk),
    "disk full, over good files": Bad(plain(*M),
        "weights/m-layer1.safetensors: cannot be written (File too large); choose another directory", under=full_disk),
    "disk full at the inputs": Bad(plain(*M, "--seq-len", "100"),
        "weights/m-layer1.b1t100.chapter.safetensors: cannot be written (File too large); choose another directory",
        under=partial(full_disk, 40_000)),
    "disk full at the kit": Bad(plain(*CASE, "--case", "new/kit"),
        "new/kit/weights.float32.safetensors: cannot be written (File too large); choose another directory",
        under=full_disk),
    "disk full, compared": Bad(plain(*CASE, "--impl", "numpy"),
        "artifacts/probe-lookup.safetensors: cannot be written (File too large); choose another directory",
        compare.main, full_disk),
    "out is a file": Bad(plain(*M, "--out", "m/config.json"),
        "m/config.json/m-layer1.safetensors: cannot be written (Not a directory); choose another directory"),
    "out is below a file": Bad(plain(*M, "--out", "m/config.json/out"),
        "m/config.json/out/m-layer1.safetensors: cannot be written (Not a directory); choose another directory"),
    "kit is a file": Bad(plain(*CASE, "--case", "m/config.json"),
        "m/config.json/weights.float32.safetensors: cannot be written (Not a directory); choose another directory"),
    "a folder in a file's place": Bad(after(folder_there, [*M, "--out", "new"]),
        "new/m-layer1.stress.safetensors: cannot be written (it is a folder); choose another directory"),
    "out is a file, compared": Bad(plain("--out", "m/config.json"),
        "--out m/config.json: cannot be written to (File exists); choose another folder", compare.main),
    "other files among the traces": Bad(after(Path("artifacts/traces/thesis.tex").touch, []),
        "--out artifacts: traces/ holds other files than traces, which a run replaces; choose another folder",
        compare.main),
    "a folder of other files among the traces": Bad(after(lambda: shutil.copytree("m", "artifacts/traces/m"), []),
        "--out artifacts: traces/ holds other files than traces, which a run replaces; choose another folder",
        compare.main),
    "a folder in the artifact's place": Bad(instead(ARTIFACT, Path.mkdir, []),
        "--out artifacts: attention_check.json is a folder there; choose another folder", compare.main),
    "a folder in the report's place": Bad(instead(REPORT, Path.mkdir, []),
        "--out artifacts: report.html is a folder there; choose another folder", compare.main),
}
# fmt: on


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "given"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        good()
    return folder


@pytest.fixture
def given(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what `good` makes, entered."""
    folder = Path(shutil.copytree(template, tmp_path / "given"))
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there is a GPU, it is not seen
    return folder


def state(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder with its content, and every link and folder."""

    def seen(path: Path) -> bytes | str:
        if path.is_symlink():
            return f"-> {path.readlink()}"
        if path.is_file():
            return path.read_bytes() if path.stat().st_size < 10**7 else f"{path.stat().st_size} bytes"
        return "folder" if path.is_dir() else "pipe"

    return {str(path.relative_to(folder)): seen(path) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def in_time() -> Iterator[None]:
    """Whoever waits for a pipe to be written waits for ever; here, for two minutes."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_changes_nothing(given: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    bad = BAD[name]
    arguments = bad.make()
    before = state(given)
    capsys.readouterr()
    with bad.under():
        status = bad.command(arguments)
    out, err = capsys.readouterr()
    assert re.fullmatch(re.escape(f"error: {bad.line}\n").replace("…", ".*"), err), err
    assert (status, out, err.count("\n")) == (2, "", 1)
    for folder in ("m", "w"):
        given.joinpath(folder).chmod(0o755)
    assert state(given) == before


def test_before_anything_is_wrong_the_artifact_is_judged_again(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one trace is of ones, which is no match; `good` has seen that everything can be exported."""
    monkeypatch.setattr("harness.planted.diagnose", lambda *_: None)  # takes seconds
    assert compare.main([*REJUDGE, *CASE]) == 1 and not capsys.readouterr().err
    old(lambda document: document.pop("traces"))()  # of a release before there were folders of runs
    Path(TRACE).rename(Path("artifacts/traces", Path(TRACE).name))
    assert compare.main([*REJUDGE, *CASE]) == 1 and not capsys.readouterr().err


def test_a_signalling_nan_in_a_trace_is_no_warning() -> None:
    """Which would be a line of its own on standard error; the verdict says that it is NaN."""
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    with compare.judges() as pools:
        for pool in pools:
            assert np.isnan(pool.submit(signalling.astype, np.float64).result())


def test_an_export_that_fails_at_its_last_file_leaves_the_old_ones(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights of the same name, and the disk is full at the second input: not even the weights are new."""
    tensors(lambda arrays: arrays[K].fill(7))()
    before = state(given)
    written = []

    def write(path: Path, *arguments: Any) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise BadInput(f"{path}: cannot be written (No space left on device)")
        write_tensors(path, *arguments)

    monkeypatch.setattr(case, "write_tensors", write)
    assert export.main(M) == 2 and len(written) == 3
    assert state(given) == before
    monkeypatch.undo()  # also of the folder
    monkeypatch.chdir(given)
    assert export.main(M) == 0 and set(state(given)) == set(before) and state(given) != before


def test_what_a_killed_export_left_is_gone_after_the_next(given: Path) -> None:
    Path("weights/.new-999999999-1").mkdir()
    Path("weights/.new-999999999-1/m-layer1.safetensors").write_text("half")
    Path(f"weights/.new-{os.getppid()}-1").mkdir()  # of one that still runs
    assert export.main(M) == 0
    assert [path.name for path in Path("weights").glob(".new-*")] == [f".new-{os.getppid()}-1"]


def test_a_link_to_safetensors_is_followed(given: Path) -> None:
    """So does Hugging Face's cache keep a model: snapshots/<commit>/model.safetensors is a link to blobs/<sha>."""
    Path("blobs").mkdir()
    WEIGHTS.rename("blobs/4d7a")
    WEIGHTS.symlink_to("../blobs/4d7a")
    assert export.main(M) == 0


def test_a_name_that_is_no_text_is_printed_all_the_same(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"m\xff")
    try:
        Path("m").rename(name)
    except OSError:
        pytest.skip("this file system's names are texts")
    assert export.main(["--weights", name]) == 0 and "layer 0 of the checkpoint m\\udcff" in capsys.readouterr().out


def test_an_array_that_is_not_contiguous_is_not_written_scrambled(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {
        "transposed": x.T,
        "Fortran": np.asfortranarray(x),
        "strided": x[::2, 1::3],
        "backwards": x[::-1, ::-1],
        "broadcast": np.broadcast_to(x[0], (3, 6)),
        "swapped": x.reshape(2, 3, 4).transpose(2, 0, 1),
        "big-endian": x.T.astype(">f4"),
        "float64": x.T.astype(np.float64),
        "short": x.astype(ml_dtypes.bfloat16).T,
        "number": np.float32(3) * np.ones(()),
    }
    path = tmp_path / "x.safetensors"
    write_tensors(path, arrays, {})
    for name, value in load_file(path).items():
        assert value.shape == arrays[name].shape and (value == arrays[name]).all(), name
    trace = {f"d_{name}.proj.weight": value for name, value in arrays.items()} | arrays
    trace["d_q_proj.weight"] = x.T  # large: a file of its own
    unusual = [name for name in trace if "big-endian" in name or "number" in name]  # the library takes none of these
    files = store({name: value for name, value in trace.items() if name not in unusual}, path, tmp_path)
    assert len(files) > 1
    for name, value in fetch(files).items():
        assert value.shape == trace[name].shape and (value == trace[name]).all(), name


# ------------------------------------------------------------------------------------------- nothing of theirs is run


class Bomb:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("gone-off",)


def test_no_code_of_a_checkpoint_is_run(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its modules, which config.json names, nor a pickle, whatever its name."""
    Path("m/modeling_own.py").write_text("import os\nos.mkdir('gone-off')\n")
    own = {"AutoConfig": "modeling_own.Config", "AutoModel": "modeling_own.Model"}
    config(auto_map=own, trust_remote_code=True)()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.json"):
        Path("m", name).write_bytes(pickle.dumps(Bomb()))
    monkeypatch.syspath_prepend(str(given / "m"))
    assert export.main(["--weights", "m"]) == 0
    assert export.main(["--weights", "m", "--text", "words"]) == 2
    for path in (WEIGHTS, Path("m/config.json"), Path(W), Path(ARTIFACT)):
        path.write_bytes(pickle.dumps(Bomb()))
    assert export.main(M) == export.main(CASE) == compare.main(REJUDGE) == 2
    assert compare.main([*CASE, "--trace", W, "--impl", "numpy"]) == 2
    assert not Path("gone-off").exists()


UNSAFE = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml", "torch.load"}
NEVER = {"allow_pickle", "trust_remote_code", "from_pretrained"}


@pytest.mark.parametrize("file", SOURCES)
def test_nothing_here_reads_a_pickle_or_runs_what_it_reads(file: str) -> None:
    """No module for it is imported, no switch that allows it is named, and text becomes code only in bugs.py: ours."""
    nodes = list(ast.walk(ast.parse(SOURCES[file].read_text(encoding="utf-8"))))
    used = imports_of(file) | {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    assert not UNSAFE & (used | {name.split(".")[0] for name in used})
    assert not NEVER & {name.split(".")[-1] for name in used}
    assert not NEVER & {node.arg for node in nodes if isinstance(node, ast.keyword)}
    builtins = {node.id for node in nodes if isinstance(node, ast.Name)} & {"eval", "exec", "compile", "__import__"}
    assert not builtins or file == "harness/bugs.py"
