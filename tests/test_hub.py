"""Of a model on the hub only the asked bytes come, and they are the right ones; what goes wrong is one line.

The client is huggingface_hub's own; the hub and its CDN answer on the loopback address.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.utils import close_session
from loopback_hub import COMMIT, MODEL, Fault, LoopbackHub
from safetensors.numpy import load_file, save_file
from test_structure_of_code import SOURCES, imports_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness import artifact, compare, export
from harness.case import Arrays, BadInput, read_case, read_inputs
from harness.checkpoint import INDEX, SINGLE, Checkpoint
from harness.export import extract_layer
from harness.hub import HubModel, open_hub
from harness.text import embedded
from impls.spec import WEIGHTS

TEXTS = ["The bank of the river", "the banks of the rivers are wide, the river is deep", "a naïve café — 河岸 🏞"]
Start = Callable[..., LoopbackHub]


def names(layer: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{name}" for name in WEIGHTS]


def stored(directory: Path) -> Arrays:
    """Every tensor of a checkpoint, as the safetensors library reads it."""
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def header_bytes(*files: Path) -> int:
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)


# ------------------------------------------------------------------------------------------------ checkpoints and hubs


def save_model(directory: Path, dtype: str, shard: str = "1GB", **fields: Any) -> Path:
    """A Qwen3 of random weights, none of them a one, by save_pretrained; with a tokenizer of its vocabulary."""
    transformers = pytest.importorskip("transformers")
    import torch

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    small = {
        "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "tie_word_embeddings": True,
    }  # fmt: skip
    config = transformers.Qwen3Config(vocab_size=tokenizer.get_vocab_size(), **small | fields)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard)
    tokenizer.enable_truncation(2)  # for training perhaps; a model that runs reads all of a text
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), "bfloat16")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("sharded"), "float32", shard="30KB", tie_word_embeddings=False)
    assert len(list(directory.glob("*.safetensors"))) > 3 and (directory / INDEX).exists()
    return directory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers as wide as Qwen3-0.6B's."""
    return save_model(
        tmp_path_factory.mktemp("wide"), "bfloat16", hidden_size=1024, intermediate_size=3072, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited; it waits none."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """A client of its own, which knows of no proxy; the tests share it, since making one takes a while."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.delenv(variable, raising=False)
            patch.delenv(variable.lower(), raising=False)
        close_session()
        yield
        close_session()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], session: None) -> Iterator[Start]:
    """Starts a hub that serves a directory; huggingface_hub then asks it, with an empty cache and no token."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "AGENT_HARNESSES_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / "home" / name), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ExitStack() as stack:

        def serve(directory: Path, **options: Any) -> LoopbackHub:
            hub = stack.enter_context(LoopbackHub(directory, **options))
            monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
            template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return hub

        yield serve


# ------------------------------------------------------------------------------------------------ what comes, and how


def test_of_a_layer_of_0_6b_s_width_13_mb_come_in_one_range(wide: Path, start: Start) -> None:
    hub, tensors = start(wide), stored(wide)
    model = open_hub(MODEL)
    model.prefetch(names(1))
    weights, config, theta, dtype = extract_layer(model.fields, model.get, 1, model.where)
    assert (config.hidden_size, config.head_dim, theta, dtype, model.commit) == (1024, 128, 5e4, "bfloat16", COMMIT)
    for name in WEIGHTS:
        np.testing.assert_array_equal(weights[name], tensors[f"model.layers.1.self_attn.{name}"].astype(np.float32))
    layer, header = sum(tensors[name].nbytes for name in names(1)), header_bytes(wide / SINGLE)
    assert layer == 2 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 2 * 128) and (wide / SINGLE).stat().st_size > 5 * layer
    assert model.bytes_fetched == hub.sent("/model.safetensors") - 5 * 3 == layer + header  # 5: the redirect's own body
    assert hub.sent("") <= 1.1 * layer + header
    assert [line[:22] for line in hub.asked("cdn")] == ["GET model.safetensors "[:22]] * 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_layer_is_the_directory_s_bit_by_bit(tmp_path: Path, start: Start, dtype: str) -> None:
    directory = save_model(tmp_path / "saved", dtype)
    start(directory)
    model, local, tensors = open_hub(MODEL), Checkpoint(directory), stored(directory)
    for name in (*names(0), *names(2), "model.norm.weight"):
        for got in (model.get(name), local.get(name)):
            assert got is not None and got.dtype.name == dtype and got.flags.owndata
            assert got.tobytes() == tensors[name].tobytes() and got.shape == tensors[name].shape
    assert model.fields == local.fields == json.loads((directory / "config.json").read_bytes())
    assert model.get("model.layers.3.self_attn.q_proj.weight") is local.get("nothing") is None


def test_a_directory_s_only_file_is_the_model(copy: Path) -> None:
    (copy / SINGLE).rename(copy / "adapter.safetensors")
    assert (Checkpoint(copy).get(names(0)[0]) == stored(copy)[names(0)[0]]).all()


def test_tensors_of_no_size_and_of_every_dtype(copy: Path, start: Start) -> None:
    dtypes = ["float64", "int64", "uint16", "int8", "bool", ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16]
    tensors = {f"of {dtype}": np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes}
    tensors |= {"none": np.zeros((0, 3), np.float32), "one": np.array(7, np.float16)}
    save_file(tensors, copy / SINGLE)
    start(copy)
    remote = open_hub(MODEL)
    remote.prefetch(tensors)
    for name, value in tensors.items():
        for model in (Checkpoint(copy), remote, open_hub(MODEL)):
            got = model.get(name)
            assert got is not None and (got.dtype, got.shape, got.tobytes()) == (
                value.dtype,
                value.shape,
                value.tobytes(),
            )


def test_a_sharded_model_is_read_from_the_shards_of_the_layer(sharded: Path, start: Start) -> None:
    hub, tensors = start(sharded), stored(sharded)
    model = open_hub(MODEL)
    model.prefetch([*names(1), "model.layers.1.self_attn.q_proj.bias"])
    asked = len(hub.requests)
    for name in names(1):
        np.testing.assert_array_equal(model.get(name), tensors[name])
    assert len(hub.requests) == asked  # all was there
    shards = {json.loads((sharded / INDEX).read_text())["weight_map"][name] for name in names(1)}
    assert {line.split()[1] for line in hub.asked("cdn")} == shards and 1 < len(shards) < 4
    layer, headers = sum(tensors[name].nbytes for name in names(1)), header_bytes(*(sharded / name for name in shards))
    assert model.bytes_fetched == layer + headers
    model.prefetch(names(2))
    assert set(model.held) == set(names(2))  # memory holds one layer
    assert all((Checkpoint(sharded).get(name) == tensors[name]).all() for name in names(0))


def test_a_revision_becomes_the_commit_that_the_hub_says(tiny: Path, start: Start) -> None:
    hub = start(tiny)
    for revision in (None, "main", "refs/pr/1", COMMIT[:7], COMMIT):
        assert (
            open_hub(MODEL, revision).commit == HfApi(hub.endpoint).model_info(MODEL, revision=revision or "main").sha
        )


def test_a_branch_that_moves_on_is_not_followed(sharded: Path, start: Start) -> None:
    hub = start(sharded)
    model = open_hub(MODEL)
    hub.revisions = {COMMIT}
    assert model.get(names(1)[0]) is not None and embedded(TEXTS[0], model, 1e-5)[1]


def test_a_directory_of_the_same_name_is_not_the_model(
    tiny: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tiny)
    (tmp_path / MODEL).mkdir(parents=True)
    save_file({"other": np.ones(3)}, tmp_path / MODEL / "other.safetensors")
    monkeypatch.chdir(tmp_path)
    assert open_hub(MODEL).get(names(0)[0]) is not None


def test_the_token_goes_to_the_hub_and_not_to_its_cdn(
    tiny: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start(tiny)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    open_hub(MODEL).prefetch(names(0))
    tokens = [(request.server, request.headers.get("authorization")) for request in hub.requests]
    assert set(tokens) == {("hub", "Bearer hf_secret"), ("cdn", None)}


def test_a_copy_in_the_cache_is_used_first(tiny: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, tensors = start(tiny), stored(tiny)
    open_hub(MODEL).get(names(0)[0])
    first = len(hub.requests)
    again = open_hub(MODEL)
    assert again.get(names(0)[0]) is not None and again.bytes_fetched > 0  # ranges are not kept
    assert hub.asked("hub")[3 + 3 :] == ["HEAD config.json", *hub.asked("hub")[3 : 3 + 3]] and first == 9

    hf_hub_download(MODEL, SINGLE)  # somebody loads the model
    hub.requests.clear()
    model = open_hub(MODEL)
    assert (model.get(names(2)[3]) == tensors[names(2)[3]]).all() and model.bytes_fetched == 0
    assert hub.asked("hub") == ["HEAD config.json"] and not hub.asked("cdn")  # is main still this commit?
    assert open_hub(MODEL, COMMIT).get(names(0)[0]) is not None and len(hub.requests) == 1  # a commit stays

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = open_hub(MODEL)
    assert model.commit == COMMIT and model.get(names(1)[0]) is not None and len(hub.requests) == 1


def test_a_sharded_model_in_the_cache_needs_no_network(
    sharded: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(sharded)
    for path in sharded.iterdir():
        hf_hub_download(MODEL, path.name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = open_hub(MODEL)
    assert model.get(names(1)[0]) is not None and model.commit == COMMIT and model.bytes_fetched == 0
    assert embedded(TEXTS[0], model, 1e-6)[0].shape[2] == 48


def test_with_the_hub_gone_the_cache_holds(tiny: Path, start: Start, waits: list[float]) -> None:
    hub = start(tiny)
    open_hub(MODEL)
    hf_hub_download(MODEL, SINGLE)
    hub.__exit__()
    close_session()
    model = open_hub(MODEL)
    assert model.commit == COMMIT and model.get(names(1)[0]) is not None and not waits


# ------------------------------------------------------------------------------------------------- what is waited for


@pytest.mark.parametrize("fault", [Fault("hub", "HEAD", "config.json"), Fault("hub", "GET", SINGLE), Fault("cdn")])
@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "7"}), (503, {}), (500, {"Retry-After": "2"})])
def test_a_busy_server_is_asked_again_when_it_says(
    tiny: Path, start: Start, waits: list[float], fault: Fault, status: int, headers: dict[str, str]
) -> None:
    hub = start(tiny)
    hub.faults = [Fault(fault.server, fault.method, fault.file, status, headers) for _ in range(2)]
    assert (open_hub(MODEL).get(names(0)[0]) == stored(tiny)[names(0)[0]]).all()
    after = int(headers.get("Retry-After", 0))
    assert waits == ([after + 1, after + 1] if after else [1, 2]) and not hub.faults


def test_a_cut_connection_is_taken_up_where_it_was_cut(wide: Path, start: Start, waits: list[float]) -> None:
    hub, tensors = start(wide), stored(wide)
    model = open_hub(MODEL)
    assert model.get("model.norm.weight") is not None
    hub.requests.clear()
    hub.faults = [Fault(cut=6_000_000), Fault(cut=0), Fault(cut=10), Fault(cut=5_000_000)]
    before = model.bytes_fetched
    model.prefetch(names(1))
    assert all((model.get(name) == tensors[name]).all() for name in names(1)) and not hub.faults
    starts = [int(line.split("=")[1].split("-")[0]) for line in hub.asked("cdn")]
    assert model.bytes_fetched - before == sum(tensors[name].nbytes for name in names(1))  # no byte twice
    assert [start - starts[0] for start in starts] == [0, 6_000_000, 6_000_000, 6_000_010, 11_000_010]
    assert waits == [2, 4, 8, 2]  # what brings a MiB is no failure


def test_an_answer_shorter_than_it_says_is_asked_for_again(tiny: Path, start: Start, waits: list[float]) -> None:
    hub = start(tiny)
    hub.faults = [Fault(body=b"abc")]
    with pytest.raises(BadInput, match="a header of"):  # the three bytes of it that came were others
        open_hub(MODEL).get(names(0)[0])
    assert hub.asked("cdn")[1] == "GET model.safetensors bytes=3-7" and waits == [2]


def test_a_server_that_stalls_is_asked_again(
    tiny: Path, start: Start, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub = start(tiny)
    hub.faults = [Fault(stall=True), Fault("hub", "GET", SINGLE, stall=True)]
    began = time.monotonic()
    assert (open_hub(MODEL).get(names(0)[0]) == stored(tiny)[names(0)[0]]).all() and waits == [2, 4]
    assert time.monotonic() - began < 9


# ---------------------------------------------------------------------------------------------- what ends in one line

WAYS_OUT = "; leave --model out for the seeded weights, or give a checkpoint on this machine by --weights DIR"
HUB = "http://127.0.0.1:PORT"
TOKEN = "a token that may read it (HF_TOKEN, or hf auth login)"


def error(of: Callable[[], object]) -> str:
    """The one line, the hub's port left out of it."""
    with pytest.raises(BadInput) as caught:
        of()
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", str(caught.value))


def read_all() -> None:
    model = open_hub(MODEL)
    model.prefetch(names(1))
    extract_layer(model.fields, model.get, 1, model.where)


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}
TERMS = f"a gated model: accept its terms at {HUB}/{MODEL} and give {TOKEN}"
PRIVATE = f"{HUB} has no such model, or it is private and needs {TOKEN}"
AGAIN = "also after waiting; try later"


def hub_says(status: int, file: str = "config.json", **headers: str) -> list[Fault]:
    """This status at every request for a file, from the hub itself."""
    named = {f"X-Error-{name}": value for name, value in headers.items()}
    return [Fault("hub", "HEAD" if file == "config.json" else "GET", file, status, named) for _ in range(9)]


def cdn_says(**headers: str) -> list[Fault]:
    """The right bytes with a header that does not fit them."""
    return [Fault(headers={name.replace("_", "-"): value for name, value in headers.items()})]


ANSWERS: dict[str, tuple[list[Fault], str]] = {
    "no access": (hub_says(401), f"no access to config.json ({HUB} answers 401); it needs {TOKEN}"),
    "no access to weights": (hub_says(403, SINGLE), f"no access to {SINGLE} ({HUB} answers 403); it needs {TOKEN}"),
    "gated": (hub_says(401, Code="GatedRepo", Message="Access to model is restricted"), TERMS),
    "gated weights": (hub_says(403, SINGLE, Code="GatedRepo"), TERMS),
    "private": (hub_says(401, Code="RepoNotFound", Message="Invalid username or password."), PRIVATE),
    "too many requests": (hub_says(429, SINGLE), f"{HUB} answers 429 for {SINGLE}, {AGAIN}"),
    "out of order": (hub_says(502), f"{HUB} answers 502 for config.json, {AGAIN}"),
    "the CDN out of order": ([Fault(status=503)] * 9, f"{HUB} answers 503 for {SINGLE}, {AGAIN}"),
    "a teapot": ([Fault(status=418)], f"{HUB} answers 418 for {SINGLE}"),
    "no hub": (
        [Fault("hub", "HEAD", headers={"X-Repo-Commit": ""})] * 2,
        f"what answers at {HUB} is no hub; check HF_ENDPOINT and the proxy",
    ),
    "cut each time": (
        [Fault(cut=1)] * 9,
        f"{HUB} cannot be reached for {SINGLE} (RemoteProtocolError: peer closed connection without sending complete "
        "message body (received 1 bytes, expected 4))",
    ),
    "another range": (cdn_says(Content_Range="bytes 8-15/99"), "the server sends bytes 8-15/99 where 0-7 was asked"),
    "beyond its end": (cdn_says(Content_Range="bytes 0-7/7"), "the server sends bytes 0-7/7 where 0-7 was asked"),
    "no range": (cdn_says(Content_Range="all"), "the server answers 206 and 'all' where a range was asked"),
    "compressed": (
        cdn_says(Content_Encoding="gzip", Content_Range="bytes 0-7/99"),
        "the server answers 206 and 'bytes 0-7/99' where a range was asked",
    ),
    "another status": (
        [Fault(status=203, headers={"Content-Range": "bytes 0-7/99"})],
        "the server answers 203 and 'bytes 0-7/99' where a range was asked",
    ),
    "more than asked": ([Fault(body=b"12345678901")], "the server sends more than bytes 0-7"),
    "another size": (
        cdn_says(Content_Range="bytes 0-7/99"),
        "not a readable safetensors file (it would have a header of LENGTH bytes, in a file of 99)",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_use_is_one_line(tiny: Path, start: Start, name: str) -> None:
    hub = start(tiny)
    faults, expected = ANSWERS[name]
    hub.faults = list(faults)
    of_the_file = expected.startswith(("the server", "not a readable"))
    length = f"{header_bytes(tiny / SINGLE) - 8:,}"
    where = f"{MODEL}/{SINGLE}" if of_the_file else MODEL
    assert error(read_all) == f"{where}: {expected.replace('LENGTH', length)}{WAYS_OUT}"


def test_a_server_that_ignores_ranges_is_left_at_once(wide: Path, start: Start) -> None:
    hub = start(wide, ranges=False)
    expected = f"{MODEL}/{SINGLE}: the server, or a proxy, ignores Range and would send the whole file"
    assert error(read_all) == expected + WAYS_OUT
    assert hub.sent() < (wide / SINGLE).stat().st_size / 3  # what the system's buffers took


def test_a_file_that_changes_between_ranges_is_refused(copy: Path, start: Start) -> None:
    start(copy)
    models = open_hub(MODEL), Checkpoint(copy)
    assert all(model.get("model.norm.weight") is not None for model in models)
    (copy / SINGLE).write_bytes((copy / SINGLE).read_bytes() + b"more")
    for model in models:
        line = f"{model.where}/{SINGLE}: changed while it was read; {model.way_out}"
        assert error(lambda model=model: model.get(names(0)[0])) == line


def test_what_is_not_there_is_one_line(tiny: Path, copy: Path, start: Start) -> None:
    start(copy)
    assert error(lambda: open_hub("some/other")) == (
        f"some/other: {HUB} has no such model, or it is private and needs {TOKEN}{WAYS_OUT}"
    )
    assert error(lambda: open_hub(MODEL, "v2")) == f"{MODEL}: has no revision v2{WAYS_OUT}"
    for revision in ("../../outside", "/main", "a b", "", "a\\b"):
        assert error(lambda revision=revision: open_hub(MODEL, revision)) == (
            f"{MODEL}: --revision {revision!r} is no branch, tag or commit{WAYS_OUT}"
        )
    for name in ("a/b/c", "../outside", "/absolute/path", "some/tiny model", "-x/y"):
        line = error(lambda name=name: open_hub(name))
        assert line.startswith(f"{name}: no model id of the hub, such as Qwen/Qwen3-0.6B (") and line.endswith(WAYS_OUT)
    (copy / SINGLE).rename(copy / "pytorch_model.bin")
    assert error(read_all) == f"{MODEL}: has neither {SINGLE} nor {INDEX}, and only safetensors is read{WAYS_OUT}"
    (copy / "config.json").unlink()
    start(copy, model="some/other")
    assert error(lambda: open_hub("some/other")) == f"some/other: has no config.json at revision main{WAYS_OUT}"


def test_offline_is_one_line(tiny: Path, start: Start, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = start(tiny)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = "offline (HF_HUB_OFFLINE is set), and {} is not in the local cache"
    assert error(lambda: open_hub(MODEL)) == f"{MODEL}: {offline.format('config.json')}{WAYS_OUT}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = open_hub(MODEL)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert error(lambda: embedded("a", model, 1e-5)) == f"{MODEL}: {offline.format('tokenizer.json')}{WAYS_OUT}"
    assert error(read_all) == f"{MODEL}: {offline.format(SINGLE)}{WAYS_OUT}"
    assert len(hub.requests) == asked and not waits


def test_a_hub_that_cannot_be_reached_is_one_line(
    tiny: Path, start: Start, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start(tiny)
    hub.__exit__()
    unreachable = f"{MODEL}: {HUB} cannot be reached for config.json (ConnectError: [Errno 111] Connection refused)"
    assert re.sub(r"Errno \d+", "Errno 111", error(lambda: open_hub(MODEL))) == unreachable + WAYS_OUT and not waits

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub = start(tiny)
    hub.faults = [Fault("hub", "HEAD", "config.json", stall=True)]
    timeout = f"{MODEL}: {HUB} cannot be reached for config.json (ReadTimeout: timed out)"
    began = time.monotonic()
    assert error(lambda: open_hub(MODEL)) == timeout + WAYS_OUT and not waits
    assert time.monotonic() - began < 9

    for proxy in ("socks5://127.0.0.1:1", "what://127.0.0.1:1", "http://127.0.0.1:port"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        close_session()
        line = error(lambda: open_hub(MODEL, COMMIT))
        assert line.startswith(f"{MODEL}: config.json cannot be fetched (") and line.endswith(WAYS_OUT)
    close_session()


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A file whose header was changed, its data left as it is."""

    def changed(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:end])
        change(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]

    return changed


def entry(name: str, **fields: Any) -> Callable[[bytes], bytes]:
    return header(lambda entries: entries[name].update(fields))


def moved(name: str, start: int, stop: int) -> Callable[[bytes], bytes]:
    """The tensor's offsets are moved by so many bytes."""

    def change(entries: dict[str, Any]) -> None:
        first, last = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [first + start, last + stop]

    return header(change)


LAST = names(2)[2]
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", r"(it is empty|answers 416)"),
    "seven bytes": (lambda _: b"1234567", r"(it ends at 7 bytes|sends bytes 0-6/7 where 0-7 was asked)"),
    "a Git LFS pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", r"\(it is a Git LFS pointer"),
    "a header of gigabytes": (lambda data: (2**33).to_bytes(8, "little") + data[8:], "a header of 8,589,934,592 bytes"),
    "a header longer than the file": (lambda data: len(data).to_bytes(8, "little") + data[8:], "a header of"),
    "a header without an end": (lambda data: data[:900], "bytes, in a file of 900"),
    "no JSON": (lambda data: data[:8] + b"x" + data[9:], "its header cannot be read as JSON"),
    "truncated": (lambda data: data[:-1], r"it is cut off after [\d,]+ of [\d,]+ bytes"),
    "an unknown dtype": (entry(LAST, dtype="F4"), f"{LAST} holds numbers of a kind that NumPy lacks"),
    "outside the file": (moved(LAST, 10**9, 10**9), r"overlap, or leave a gap: .* lies from byte [\d,]+"),
    "a gap": (header(lambda entries: entries.pop(names(0)[0])), r"overlap, or leave a gap: .* lies from byte [\d,]+"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_safetensors_file_is_one_line(copy: Path, start: Start, name: str) -> None:
    change, expected = FILES[name]
    (copy / SINGLE).write_bytes(change((copy / SINGLE).read_bytes()))
    start(copy)
    for model in (Checkpoint(copy), open_hub(MODEL)):
        line = error(lambda model=model: model.get(LAST))
        assert re.search(expected, line) and line.startswith((model.where, f"{copy}/"))
        assert not isinstance(model, HubModel) or line.endswith(WAYS_OUT)
    assert model.bytes_fetched < 4000  # nothing was read for nothing


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x.safetensors", "C:x.safetensors"]
Q = names(0)[0]
INDICES: dict[str, tuple[object, str]] = {
    "no map": ({}, "has no weight_map from tensors to files"),
    "numbers": ({"weight_map": {Q: 1}}, "has no weight_map from tensors to files"),
    "a shard is missing": ({"weight_map": {Q: "gone.safetensors"}}, f"gone.safetensors: missing, it should hold {Q}"),
    "a shard lacks it": ({"weight_map": {Q: "shard.safetensors"}}, f"it lacks {Q}"),
    **{
        file: ({"weight_map": {Q: file}}, f"says that {Q} lies in {file!r}, which is no safetensors file beside it")
        for file in (*OUTSIDE, "pytorch_model.bin", "", ".safetensors", "x.safetensors\n")
    },
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_points_elsewhere_is_one_line(copy: Path, start: Start, name: str) -> None:
    (copy / SINGLE).unlink()
    save_file({"other": np.ones(3, np.float32)}, copy / "shard.safetensors")
    (copy / INDEX).write_text(json.dumps(INDICES[name][0]))
    hub = start(copy)
    for model in (Checkpoint(copy), open_hub(MODEL)):
        assert INDICES[name][1] in error(lambda model=model: model.get(Q))
    asked = {request.path.rsplit("/", 1)[1] for request in hub.requests}
    assert asked <= {"config.json", SINGLE, INDEX, "gone.safetensors", "shard.safetensors"}


# -------------------------------------------------------------------------------------------------------- environment


def test_the_client_s_own_variables_hold(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, which reaches the hub through a proxy only."""
    code = f"""
import sys
from harness.case import BadInput
from harness.hub import open_hub
try:
    model = open_hub({MODEL!r})
    print(model.commit, model.get({names(0)[0]!r}).dtype, model.bytes_fetched)
except BadInput as error:
    print(error)
"""
    kept = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    with LoopbackHub(tiny) as hub:
        given = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint, "NO_PROXY": "localhost"}
        given |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}

        def run(**more: str) -> str:
            command = [sys.executable, "-W", "error", "-c", code]
            return subprocess.run(command, env=kept | given | more, capture_output=True, text=True, check=True).stdout

        assert run() == f"{COMMIT} bfloat16 {header_bytes(tiny / SINGLE) + 60 * 48 * 2}\n"
        assert {request.headers["host"] for request in hub.requests if request.server == "hub"} == {"hub.invalid"}
        assert hub.requests[0].headers["authorization"] == "Bearer hf_secret"
        assert (tmp_path / f"home/hub/models--some--tiny-model/snapshots/{COMMIT}/config.json").exists()
        asked = len(hub.requests)
        assert run(HF_HUB_OFFLINE="1").startswith(f"{MODEL}: offline (HF_HUB_OFFLINE is set), and {SINGLE} is not")
        assert len(hub.requests) == asked


def test_only_this_module_uses_the_network() -> None:
    network = {"huggingface_hub", "httpx", "httpx2", "requests", "urllib", "urllib3", "http", "socket", "ssl", "ftplib"}
    used = {file: network & {name.split(".")[0] for name in imports_of(file)} for file in SOURCES}
    assert {file for file, modules in used.items() if modules} == {"harness/hub.py", "harness/mesh.py"}
    assert used["harness/mesh.py"] == {"socket"}  # for a free port of the loopback, where its processes meet


# --------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_becomes_what_layer_0_is_fed(tmp_path: Path, start: Start, dtype: str) -> None:
    """As transformers' own model and tokenizer in float32 have it, from the hub and from the directory."""
    transformers = pytest.importorskip("transformers")
    import torch

    directory = save_model(tmp_path / "saved", dtype)
    model = transformers.Qwen3Model.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    seen: list[torch.Tensor] = []
    model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["hidden_states"]), with_kwargs=True
    )
    hub = start(directory)
    for text in TEXTS:
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt").input_ids
            model(ids)
        hub.requests.clear()
        remote = open_hub(MODEL)
        for checkpoint in (Checkpoint(directory), remote):
            hidden_states, tokens = embedded(text, checkpoint, 1e-5)
            assert hidden_states.dtype == np.float32 and hidden_states.shape == (1, ids.shape[1], 48)
            np.testing.assert_allclose(hidden_states, seen[-1].numpy(), rtol=4 * 2.0**-24, atol=0)
            assert len(tokens) == ids.shape[1] and tokens == [tokens[list(ids[0]).index(id)] for id in ids[0]]
        width = 48 * np.dtype(dtype if dtype == "float32" else ml_dtypes.bfloat16).itemsize
        assert remote.bytes_fetched == header_bytes(directory / SINGLE) + (len(ids.unique()) + 1) * width
    assert embedded("the banks<|end|>", remote, 1e-5)[1] == ["the", " bank", "s", "<|end|>"]
    tokens = embedded("naïve 🏞", remote, 1e-5)[1]
    assert tokens[:2] == ["n", "a"] and not any("\ufffd" in token for token in tokens)  # parts of a character


def test_a_base_model_s_names_lack_a_prefix(tiny: Path, copy: Path, start: Start) -> None:
    tensors = {name.removeprefix("model."): value for name, value in stored(copy).items()}
    save_file(tensors, copy / SINGLE)
    start(copy)
    expected = embedded(TEXTS[0], Checkpoint(tiny), 1e-5)
    for model in (Checkpoint(copy), open_hub(MODEL)):
        hidden_states, tokens = embedded(TEXTS[0], model, 1e-5)
        assert (hidden_states == expected[0]).all() and tokens == expected[1]


def test_a_text_that_cannot_be_read_is_one_line(copy: Path, start: Start) -> None:
    start(copy)

    def line(text: str = "words", of: object = HubModel) -> str:
        """From the hub or from the directory; they differ in their beginnings and ends."""
        model = open_hub(MODEL) if of is HubModel else Checkpoint(copy)
        return error(lambda: embedded(text, model, 1e-5)).replace(WAYS_OUT, "").removeprefix(model.where)

    assert line("") == "--text '': no tokens; give some words"
    assert re.fullmatch(r": tokenizer.json cannot read --text '\\udcff' \(.+\)", line("\udcff"))
    weights = stored(copy)
    rows = weights["model.embed_tokens.weight"]
    save_file(weights | {"model.embed_tokens.weight": rows[:50]}, copy / SINGLE)
    assert re.fullmatch(r"/model.safetensors: model.embed_tokens.weight has shape \[50, 48\] and no row \d+", line())
    save_file(weights | {"model.embed_tokens.weight": np.full_like(rows, np.nan)}, copy / SINGLE)
    assert "embed_tokens.weight at the text's tokens has" in line() and "that are NaN" in line()
    save_file(weights | {"model.layers.0.input_layernorm.weight": np.ones(47, np.float32)}, copy / SINGLE)
    assert line() == ": input_layernorm.weight has shape [47], expected [48]"
    del weights["model.layers.0.input_layernorm.weight"]
    save_file(weights, copy / SINGLE)
    assert line() == ": lacks the embedding (model.embed_tokens.weight) or layer 0's input_layernorm.weight"
    (copy / "tokenizer.json").write_text("{}")
    start(copy, model="some/other")
    assert line(of=Checkpoint).startswith(": tokenizer.json cannot read --text 'words' (")
    (copy / "tokenizer.json").unlink()
    assert line(of=Checkpoint) == ": has no tokenizer.json, which --text needs; download the checkpoint again"


# --------------------------------------------------------------------------------------------------------- the commands


def test_a_layer_and_a_text_are_exported_from_the_hub(tiny: Path, start: Start, tmp_path: Path, capsys: Any) -> None:
    start(tiny)
    arguments = ["--model", MODEL, "--layer", "0", "2", "--text", TEXTS[0], "--out", str(tmp_path / "w")]
    assert export.main(arguments) == 0
    assert not capsys.readouterr().err
    stem = f"{MODEL.replace('/', '--')}-{COMMIT[:12]}"
    case = read_case(tmp_path / "w" / f"{stem}-layer2.safetensors")
    source = {"kind": "hub", "model": MODEL, "revision": COMMIT, "layer": 2, "dtype": "bfloat16"}
    assert case.source == source and set(case.inputs) == {"chapter", "stress"}
    (text,) = (tmp_path / "w").glob(f"{stem}-layer0.*.text.safetensors")  # layer 0 alone is fed by the text
    made = read_inputs(case, {"text": text}).made["text"]
    assert made["text"] == TEXTS[0] and "".join(made["tokens"]) == TEXTS[0] and made["kind"] == "text"


def test_a_layer_that_the_model_has_not_is_one_line(tiny: Path, start: Start, tmp_path: Path, capsys: Any) -> None:
    start(tiny)
    assert export.main(["--model", MODEL, "--layer", "3", "--out", str(tmp_path / "out")]) == 2
    line = f"error: {MODEL}/config.json: the model has layers 0 to 2; --layer 3 is not among them\n"
    assert capsys.readouterr().err == line and not (tmp_path / "out").exists()


def test_a_checkpoint_s_text_is_compared_and_labels_the_maps(tiny: Path, tmp_path: Path) -> None:
    """What layer 0 is fed; the deeper layer has the plain inputs, and the artifact says so."""
    arguments = ["--weights", str(tiny), "--layer", "0", "1", "--text", TEXTS[0], "--impl", "numpy", "--rope", "model"]
    assert compare.main([*arguments, "--out", str(tmp_path), "--quiet"]) == 0
    document = artifact.read(tmp_path / "attention_check.json")
    tokens = document["inputs"]["text"]["tokens"]
    assert "".join(tokens) == TEXTS[0] and len(tokens) > 4
    assert {(row["layer"], row["input"]) for row in document["checks"]} >= {(0, "text"), (1, "chapter")}
    assert not any(row["layer"] == 1 and row["input"] == "text" for row in document["checks"])
    assert "the text on layer 1: what that sees depends" in " ".join(document["frameworks"]["numpy"]["not_checked"])
    page = (tmp_path / "report.html").read_text()
    assert all(token.strip() in page for token in tokens) and "text input, model RoPE" in page
