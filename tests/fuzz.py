"""Damaged files before everything that reads files: each is used, or refused in one line; in time, and in memory.

python tests/fuzz.py [N]    N damaged files (10,000) and a table of what became of them; `make campaign` runs it
"""

import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from safetensors.numpy import save_file
from test_artifact import WHERE, document, framework
from tokenizers import Tokenizer, models, pre_tokenizers

from harness import artifact, compare, exchange, export
from harness.case import BadInput, read_case, seeded_case
from harness.judging import LAYER
from harness.runners import Setting, fetch, run_numpy, trace_file
from impls.spec import AttentionConfig, weight_shapes

CONFIG = AttentionConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6)
SECONDS = 1.0  # of the processor: others may be at work on this machine
MEMORY = 64_000_000  # bytes beyond the file's own, for whatever is small
HANGS = 10  # seconds of waiting, and then it is given up
W, CHAPTER = "w/seeded-0.safetensors", "w/seeded-0.chapter.safetensors"
RUNS = [Setting("chapter", "model", dtype) for dtype in ("float32", "float64")]
EXPORTED, CHECKPOINT = ["--weights", W, "--out", "out"], ["--weights", "m", "--layer", "1", "--out", "out"]


# ------------------------------------------------------------------------------------------------------ what is damaged


def prepare() -> None:
    """Here: a checkpoint m/, the same sharded s/, an exported case w/, a kept run a/ and answers/ to judge."""
    tensors = {
        f"model.layers.{i}.self_attn.{name}": np.full(shape, 1 + i, np.float32)
        for i in range(2)
        for name, shape in weight_shapes(CONFIG).items()
    }
    tensors["model.embed_tokens.weight"] = np.ones((300, CONFIG.hidden_size), np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.ones(CONFIG.hidden_size, np.float32)
    fields = {"model_type": "qwen3", **vars(CONFIG), "num_hidden_layers": 2, "rope_theta": 1e6, "attention_bias": False}
    fields |= {"rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2}
    for folder in ("m", "s"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(fields, indent=2))
    save_file(tensors, "m/model.safetensors", {"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save("m/tokenizer.json")
    names = [f"model-{i}.safetensors" for i in (1, 2)]
    shards = [dict(each) for each in (list(tensors.items())[::2], list(tensors.items())[1::2])]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, Path("s", name))
    table = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    Path("s/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    seeded_case(Path("w"), config=CONFIG, seq_len=12)
    keep_run()


def keep_run() -> None:
    """a/, as a run of NumPy leaves it; of the layer, too, there are NumPy's traces."""
    case, rows = read_case(Path(W)), []
    Path("a/traces/run").mkdir(parents=True)
    Path("answers").mkdir()
    for setting in RUNS:
        trace = run_numpy(*case.arrays(*setting), case.config)
        rows.append(artifact.judged(0.0, 1.0, **(WHERE | setting._asdict()))._asdict())
        for name in ("numpy", LAYER):
            save_file(trace, Path("a/traces/run", trace_file(name, 0, setting)))
        save_file(trace, Path("answers", f"{setting.label}.safetensors"), {"case": case.sha256["weights"]})
    inputs = {name: {**case.made[name], "sha256": case.sha256[name]} for name in case.inputs}
    weights = {"source": case.source, "description": case.describe(), "sha256": case.sha256["weights"]}
    kept = document(frameworks={"numpy": framework()}, checks=rows, inputs=inputs, weights=weights, pairwise={})
    artifact.write(kept | {"traces": "traces/run"}, "a/attention_check.json")


def command(main: Callable[[Sequence[str]], int], *arguments: str) -> Callable[[], bool]:
    """Runs it and says whether it used the file; AssertionError where it does not, and does not say why in one line."""

    def run() -> bool:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        said = err.getvalue()
        if status == 2:
            assert said.startswith("error: ") and said.endswith("\n") and said[:-1].isprintable(), said
            assert not out.getvalue() and not Path("out").exists(), "something was written"
        else:
            assert status in (0, 1, 3) and not said, (status, said)
        shutil.rmtree("out", ignore_errors=True)
        return status != 2

    return run


class Landed:
    """A judge that reads what lands, as `harness.judging` does, and takes what that takes for unreadable."""

    def land(self, name: str, setting: Setting, files: dict[str, str]) -> None:
        from harness.judging import UNREADABLE

        with contextlib.suppress(*UNREADABLE):
            fetch(files)


def trace() -> bool:
    """Lets the answers to --trace land, and says whether they were used."""
    try:
        exchange.land(exchange.answers([Path("answers")]), read_case(Path(W)), Landed(), RUNS)
    except BadInput as error:
        assert "\n" not in str(error)
        return False
    return True


class Target(NamedTuple):
    """A file, who reads it, and how many of a hundred damaged files are this one."""

    path: str
    read: Callable[[], bool]
    share: int


TARGETS = {
    "weights of a checkpoint": Target("m/model.safetensors", command(export.main, *CHECKPOINT), 20),
    "config.json": Target("m/config.json", command(export.main, *CHECKPOINT), 15),
    "index.json": Target("s/model.safetensors.index.json", command(export.main, "--weights", "s", "--out", "out"), 10),
    "a shard": Target("s/model-2.safetensors", command(export.main, "--weights", "s", "--out", "out"), 5),
    "tokenizer.json": Target(
        "m/tokenizer.json", command(export.main, "--weights", "m", "--text", "a b", "--out", "out"), 5
    ),
    "an exported layer": Target(W, command(export.main, *EXPORTED), 15),
    "an exported input": Target(CHAPTER, command(export.main, *EXPORTED), 10),
    "an answer, --trace": Target("answers/chapter.model.float32.safetensors", trace, 12),
    "an artifact, --rejudge": Target(
        "a/attention_check.json", command(compare.main, "--rejudge", "a", "--weights", W, "--quiet"), 5
    ),
    "a kept trace, --rejudge": Target(
        f"a/traces/run/{trace_file('numpy', 0, RUNS[0])}",
        command(compare.main, "--rejudge", "a", "--weights", W, "--quiet"),
        3,
    ),
}


# ---------------------------------------------------------------------------------------------------- how it is damaged

RAW = {"@inf": "1e400", "@nan": "NaN", "@deep": "[" * 5000 + "]" * 5000, "@digits": "9" * 5000, "@tiny": "5e-324"}
"""What stands in JSON text, and cannot be had from `json.dumps`."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64 - 1, 10**30, -(10**30), 0.5, 1e308, "", "x", "0", "F64",
    "../x", "/etc/passwd", "\ud800", "\x00", "\x1b[2J", "x" * 100_000, [], [[]], {}, {"a": 1}, [0, 0], [1e9], *RAW,
)  # fmt: skip


def flip(data: bytearray, r: random.Random) -> None:
    """One to eight bits, anywhere or among the first hundred bytes."""
    for _ in range(r.randint(1, 8)):
        if data:
            data[r.randrange(r.choice((len(data), min(100, len(data)))))] ^= 1 << r.randrange(8)


def cut(data: bytearray, r: random.Random) -> None:
    """Its end, or a slice."""
    start = r.randrange(len(data) + 1)
    del data[start : r.choice((len(data), start + r.randint(1, 100)))]


def insert(data: bytearray, r: random.Random) -> None:
    """Random bytes, or some of its own once more."""
    at, start = r.randrange(len(data) + 1), r.randrange(len(data) + 1)
    data[at:at] = r.choice((r.randbytes(r.randint(1, 100)), data[start : start + r.randint(1, 1000)]))


def overwrite(data: bytearray, r: random.Random) -> None:
    """A slice, of zeros, of ones, or of other numbers; in place of tensors that is NaN and infinity."""
    start, length = r.randrange(len(data) + 1), r.randint(1, 64)
    data[start : start + length] = (r.choice((b"\0", b"\xff", b"\x7f\x80")) * length)[: len(data) - start][:length]


def length(data: bytearray, r: random.Random) -> None:
    """The eight bytes that are a header's length."""
    value = r.choice((0, 1, 2, len(data), max(8, len(data)) - 8, 2**20, 10**8, 2**31, 2**40, 2**63, 2**64 - 1))
    data[:8] = (value + r.randint(0, value > 0)).to_bytes(9, "little")[:8]


def swap(data: bytearray, r: random.Random) -> None:
    """Another of the files."""
    data[:] = Path(r.choice(list(TARGETS.values())).path).read_bytes()


def edit(data: bytearray, r: random.Random) -> None:
    """Its JSON, or that in its header: one to three values changed, left out, added, moved or named twice."""
    safetensors = data[8:9] == b"{"
    end = 8 + int.from_bytes(data[:8], "little") if safetensors else len(data)
    text = bytes(data[8:end] if safetensors else data)
    try:
        value = json.loads(text)
        for _ in range(r.randint(1, 3)):
            value = changed(value, r)
        new = json.dumps(value)
    except (RecursionError, ValueError):
        return
    for name, raw in RAW.items():
        new = new.replace(f'"{name}"', raw)
    if r.random() < 0.1 and '": ' in new:  # a name twice
        new = new.replace("{", "{" + new[new.index('"') : new.index('": ') + 3] + "1, ", 1)
    fresh = new.encode(errors="surrogatepass")
    data[:] = len(fresh).to_bytes(8, "little") + fresh + data[end:] if safetensors else fresh


def changed(value: Any, r: random.Random) -> Any:
    """This JSON with one place of it changed."""
    if isinstance(value, str) and value[:1] in ("{", "[") and r.random() < 0.8:  # JSON in a header's metadata
        try:
            text = json.dumps(changed(json.loads(value), r))
        except ValueError:
            return value
        for name, raw in RAW.items():
            text = text.replace(f'"{name}"', raw)
        return text
    if not value or not isinstance(value, dict | list) or r.random() < 0.1:
        return r.choice((r.choice(VALUES), value * r.choice((-1, 2, 0.5, 10**9)) if is_number(value) else None))
    place = r.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy = value.copy()
    match r.randrange(8):
        case 0:
            copy.pop(place)
        case 1 if isinstance(copy, dict):
            copy[r.choice((f"{place}x", "x", place[:-1], "\ud800", "__metadata__"))] = copy.pop(place)
        case 2 if isinstance(copy, dict):
            copy[r.choice(list(copy))] = copy[place]
        case 3 if isinstance(copy, list):
            copy.insert(place, r.choice(VALUES))
        case _:
            copy[place] = changed(copy[place], r)
    return copy


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DAMAGES = (flip, cut, insert, overwrite, length, edit, edit, edit, edit, swap)


def damaged(data: bytes, r: random.Random) -> bytes:
    """The file with one damage, seldom two."""
    new = bytearray(data)
    for damage in [r.choice(DAMAGES) for _ in range(r.choice((1, 1, 1, 2)))]:
        damage(new, r)
    return bytes(new)


# --------------------------------------------------------------------------------------------------- what became of it


@dataclass
class Tally:
    """What became of one target's damaged files."""

    used: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds
    largest: int = 0  # bytes of memory beyond the file's own
    failures: list[str] = field(default_factory=list)


def attempt(target: Target, size: int) -> tuple[bool, float, int]:
    """Whether it was used, in how many seconds of the processor, and the memory that it took beyond the file's size."""
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        used = target.read()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return used, time.process_time() - start, tracemalloc.get_traced_memory()[1] - before - size


def hang(*_: object) -> None:
    raise TimeoutError(f"it hangs, for {HANGS} s")


def campaign(count: int, seed: int = 0) -> dict[str, Tally]:
    """Damages so many files, puts each before its reader, and tells by target what became of them.

    Here is a folder for this alone.
    """
    prepare()
    tallies = {name: Tally() for name in TARGETS}
    order = list(itertools.chain.from_iterable([name] * target.share for name, target in TARGETS.items()))
    assert len(order) == 100
    random.Random(0).shuffle(order)
    originals = {target.path: Path(target.path).read_bytes() for target in TARGETS.values()}
    signal.signal(signal.SIGALRM, hang)
    for target in TARGETS.values():
        assert target.read(), target.path
    tracemalloc.start()
    # what a trace that differs may come from, and what none would show, takes seconds to find, whatever the file
    with mock.patch("harness.planted.diagnose"), mock.patch("harness.planted.blind_to", lambda *_: []):
        for number, name in zip(range(count), itertools.cycle(order), strict=False):
            put(name, tallies[name], originals, f"{seed} {number}")
    tracemalloc.stop()
    return tallies


def put(name: str, tally: Tally, originals: dict[str, bytes], seed: str) -> None:
    """Puts one damaged file before its reader; `seed` makes the same one again."""
    target = TARGETS[name]
    data = damaged(originals[target.path], random.Random(seed))
    Path(target.path).write_bytes(data)
    try:
        used, seconds, memory = attempt(target, len(data))
        tally.used, tally.refused = tally.used + used, tally.refused + (not used)
        tally.slowest, tally.largest = max(tally.slowest, seconds), max(tally.largest, memory)
        if seconds > SECONDS or memory > MEMORY:
            tally.failures.append(f"{seed}: {seconds:.1f} s, {memory:,} bytes")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        tally.failures.append(f"{seed}: {traceback.format_exc().strip()}")
        tally.refused += 1
    finally:
        Path(target.path).write_bytes(originals[target.path])


def table(tallies: dict[str, Tally]) -> str:
    """What became of them, in words and numbers."""
    total = Counter[str]()
    lines = [f"{'':24} {'damaged':>8} {'used':>6} {'refused':>8} {'slowest':>9} {'memory beyond the file':>24}"]
    for name, tally in tallies.items():
        count = tally.used + tally.refused
        total.update(damaged=count, used=tally.used, refused=tally.refused, failures=len(tally.failures))
        lines.append(
            f"{name:24} {count:8,} {tally.used:6,} {tally.refused:8,} {tally.slowest * 1e3:6.0f} ms "
            f"{tally.largest / 1e6:21.1f} MB"
        )
    slowest, largest = (max(getattr(each, what) for each in tallies.values()) for what in ("slowest", "largest"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    lines.append(
        f"{'all':24} {total['damaged']:8,} {total['used']:6,} {total['refused']:8,} {slowest * 1e3:6.0f} ms "
        f"{largest / 1e6:21.1f} MB"
    )
    return "\n".join(
        [
            f"{total['damaged']:,} damaged files, {total['failures']} failures. A failure: anything but use or a "
            f"refusal in one line, more than {SECONDS:g} s of the processor or {HANGS} s of waiting, or more than "
            f"{MEMORY / 1e6:.0f} MB beyond the file's size.",
            *lines,
            f"The whole process, with NumPy and all that it imports: at most {peak / 1e6:.0f} MB.",
        ]
    )


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """A folder of one's own, entered."""
    with tempfile.TemporaryDirectory() as name:
        before = os.getcwd()
        os.chdir(name)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    with folder():
        found = campaign(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    print(table(found))
    failures = [f"{name}: {each}" for name, tally in found.items() for each in tally.failures]
    print(*failures[:20], sep="\n\n", file=sys.stderr)
    sys.exit(bool(failures))
