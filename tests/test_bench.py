"""The benchmark: what follows from seconds, what is timed, and the command with its processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import make_case
from jsonschema import Draft202012Validator

from harness import artifact, bench, rates, runners, timed
from harness.case import QWEN3_0_6B
from harness.report.benchmark import latest, omissions, picture, sheets
from harness.report.figures import standalone
from harness.report.html import render_html
from harness.timed import DIRECTIONS, MATMUL
from impls.spec import AttentionConfig, weight_shapes

ROOT = Path(__file__).resolve().parent.parent
RUN = {"dtype": "float32", "seq_len": 64, "direction": "forward"}
QUIET = {"memory": None, "compile_seconds": None}


# ------------------------------------------------------------------------------------------------------------- figures


def test_a_ratio_is_taken_within_a_round_and_not_between_medians() -> None:
    """The machine slows down threefold in the third round, for all alike: no ratio moves."""
    slow = np.array([1.0, 1.0, 3.0, 1.0, 1.0])
    seconds = {"hf-sdpa": list(2.0 * slow), "jax": list(3.0 * slow), MATMUL: list(0.5 * slow)}
    found = rates.rows(RUN, seconds, dict.fromkeys(seconds, QUIET), QWEN3_0_6B, "cpu")
    of = {row["implementation"]: row for row in found}
    assert set(of) == {"hf-sdpa", "jax"}
    assert of["jax"]["ratio"] == {"median": 1.5, "q1": 1.5, "q3": 1.5}
    assert of["hf-sdpa"]["ratio"]["median"] == 1
    assert of["jax"]["seconds"] == {"median": 3.0, "q1": 3.0, "q3": 3.0, "rounds": [3.0, 3.0, 9.0, 3.0, 3.0]}
    share = rates.operations(QWEN3_0_6B, 64, "forward") / 3.0 / (2 * 2048**3 / 0.5)
    assert of["jax"]["matmul_share"]["median"] == pytest.approx(share, rel=1e-3)


def test_quartiles_are_of_the_rounds() -> None:
    assert rates.spread(np.array([5.0, 1.0, 2.0, 4.0, 3.0])) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_without_the_baseline_or_the_product_there_is_no_ratio_and_no_share() -> None:
    (row,) = rates.rows(RUN, {"jax": [1.0]}, {"jax": QUIET}, QWEN3_0_6B, "cpu")
    assert row["ratio"] is row["matmul_share"] is row["peak_bytes"] is row["working_bytes"] is None


def test_operations_are_those_of_the_products() -> None:
    """Counted by hand for D = 3, N = 2, K = 1, H = 4, T = 5: 15 query-key pairs at and below the diagonal."""
    config = AttentionConfig(3, 2, 1, 4, 1e-6)
    projections = 5 * 2 * (3 * 8 + 3 * 4 + 3 * 4 + 8 * 3)
    assert rates.operations(config, 5, "forward") == projections + 2 * 15 * 2 * 4 * 2
    assert rates.operations(config, 5, "forward+backward") == 3 * rates.operations(config, 5, "forward")


def result(name: str, T: int, seconds: float, working: int | None) -> dict[str, Any]:
    return {
        "implementation": name,
        "dtype": "float32",
        "direction": "forward",
        "seq_len": T,
        "seconds": {"median": seconds},
        "working_bytes": working,
    }


def test_exponents_are_those_of_the_largest_three_lengths() -> None:
    lengths = (12, 64, 512, 1024, 4096)
    results = [result("jax", T, 1.0 if T < 512 else 1e-6 * T**1.5, 7 if T < 512 else 3 * T**2) for T in lengths]
    (grown,) = rates.growth(results)
    assert (grown["seconds"], grown["working_bytes"], grown["seq_lens"]) == (1.5, 2.0, [512, 1024, 4096])


def test_where_there_is_one_length_nothing_is_known_to_grow() -> None:
    (grown,) = rates.growth([result("jax", 12, 1.0, None)])
    assert grown["seconds"] is grown["working_bytes"] is None


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([12, 64, 512, 2048, 4096, 8192], [12, 64, 512, 2048, 4096, 8192]),
        ([8192], [512, 2048, 8192]),
        ([12, 5000], [12, 312, 1250, 5000]),
        ([1024], [1024]),
    ],
)
def test_memory_is_known_at_a_quarter_of_a_length_before_it_is_tried(lengths: list[int], expected: list[int]) -> None:
    assert bench.steps(lengths) == expected


def test_what_would_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("free", (), {"available": 8 * 2**30}))
    square, linear = ({T: T**power * 2**30 // 1024**power for T in (1024, 2048)} for power in (2, 1))
    assert bench.too_large(square, 4096) == "it would need about 16 GiB of memory, and 8 GiB are free"
    assert not bench.too_large(linear, 4096)
    assert not bench.too_large({1024: 2**40}, 2048)  # one length tells no growth


# ---------------------------------------------------------------------------------------------------- what is timed


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", rates.NAMES)
def test_what_is_timed_is_the_layer(name: str, direction: str, attention_bias: bool) -> None:
    """Its output, and the gradients of the hidden states and of all weights, are those of the recorded run."""
    config = AttentionConfig(20, 6, 3, 8, 1e-6, attention_bias)
    case = make_case(config, 1, 7).astype(np.float32)
    expected = runners.load(timed.framework(name)).run(*case)
    returned = timed.prepare(name, direction, *case, "cpu").call()
    output, gradients = (returned, {}) if direction == "forward" else returned
    assert set(gradients) == (
        {"d_hidden_states", *(f"d_{each}" for each in weight_shapes(config))} if gradients else set()
    )
    assert bool(gradients) == (direction == "forward+backward")
    for entry, value in {"output": output, **gradients}.items():
        value = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
        np.testing.assert_allclose(value, expected[entry], rtol=1e-4, atol=1e-5, err_msg=entry)


def test_a_short_call_is_called_until_its_time_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(*seconds: float) -> float:
        left = iter(seconds)
        return timed.sample(timed.Timed(lambda: None, lambda call: next(left), lambda call: None))

    assert sampled(3.0, 9.0) == 3.0
    assert sampled(0.09, 0.02, 0.05, 0.04, 9.0) == pytest.approx(0.11 / 3)  # the first is not counted


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone forgets a maximum")
def test_memory_is_that_of_the_call_and_not_of_an_earlier_one() -> None:
    def held(mebibytes: int) -> int:
        memory = timed.resident(lambda: np.ones(mebibytes * 2**17).sum())
        assert memory and memory.peak > memory.working
        return memory.working // 2**20

    assert 250 <= held(256) <= 300
    assert 60 <= held(64) <= 110


# ----------------------------------------------------------------------------------------------------------- command


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small benchmark by real processes, of which one dies when it is asked for its second length."""
    out = tmp_path_factory.mktemp("bench")
    fatal = out / "sitecustomize.py"
    fatal.write_text(
        "import sys\n"
        "if 'numpy-tiled' in sys.argv or sys.orig_argv[-1:] == ['numpy-tiled']:\n"
        "    import os, impls.numpy_tiled as page\n"
        "    forward = page.forward\n"
        "    def fail(weights, inputs, config, observe=None):\n"
        "        if inputs['hidden_states'].shape[1] > 3: os.abort()\n"
        "        return forward(weights, inputs, config)\n"
        "    page.forward = fail\n"
    )
    names = ["numpy", "numpy-tiled", "jax-tiled"]
    done = run(
        *["--impl", *names, "--seq-len", "3", "5", "--rounds", "2", "--out", str(out), "--dtype", "float32"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(out), str(ROOT)])},
    )
    assert done.returncode == 3, done.stderr
    return out, done.stdout


def test_the_result_is_as_its_schema_says(small: tuple[Path, str]) -> None:
    document = artifact.read(small[0] / "benchmark.json")
    Draft202012Validator(rates.SCHEMA).validate(document)
    ran = {(each["implementation"], each["seq_len"], each["direction"]) for each in document["results"]}
    assert ran == {
        *((name, T, way) for name in ("hf-sdpa", "numpy", "jax-tiled") for T in (3, 5) for way in DIRECTIONS),
        *(("numpy-tiled", 3, way) for way in DIRECTIONS),
    }
    for each in document["results"]:
        assert len(each["seconds"]["rounds"]) == 2
        assert each["ratio"]["median"] > 0 and each["matmul_share"]["median"] > 0
        assert (each["compile_seconds"] is not None) == each["implementation"].startswith("jax")
    assert document["matmul"]["gflops"]["median"] > 1
    assert all(bits["float32"] == 24 for bits in document["environment"]["matmul_bits"].values())
    assert str(ROOT) not in (small[0] / "benchmark.json").read_text()


def test_what_dies_is_said_and_the_rest_goes_on(small: tuple[Path, str]) -> None:
    left = artifact.read(small[0] / "benchmark.json")["left_out"]
    found = [(each["implementation"], each["seq_len"], each["direction"], each["failed"]) for each in left]
    assert found == [("numpy-tiled", 5, direction, True) for direction in DIRECTIONS]
    assert "SIGABRT" in left[0]["reason"]
    what = "Left out numpy-tiled, float32, forward and forward+backward, T = 5: its process was killed"
    said = " ".join(small[1].split())
    assert what in said


def test_the_tables_and_the_picture_are_of_the_result(small: tuple[Path, str]) -> None:
    document = artifact.read(small[0] / "benchmark.json")
    forward, both = sheets(document)
    assert forward.title == "float32, forward" and both.lengths == [3, 5]
    assert [line.name for line in forward.lines] == ["hf-sdpa, ms", "numpy", "numpy-tiled", "jax-tiled"]
    assert forward.lines[2].cells[1] == ("-", "")
    assert "hf-sdpa, ms" in small[1]
    drawn = (small[0] / "benchmark.svg").read_text()
    assert drawn == standalone(picture(document)) and "jax-tiled" in drawn and "var(" not in drawn


def test_the_report_shows_the_first_benchmark_that_it_finds(small: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text('{"mine": 1}')
    found = latest(tmp_path / "none.json", tmp_path / "benchmark.json", small[0] / "benchmark.json")
    assert found == artifact.read(small[0] / "benchmark.json")
    assert latest(tmp_path / "benchmark.json") is None
    document = artifact.read(ROOT / "artifacts" / "evidence" / "attention_check.json")
    assert "Time and memory" not in render_html(document)
    page = render_html(document, benchmark=found)
    assert '<h2 id="benchmark">Time and memory</h2>' in page and "numpy-tiled, float32, forward and" in page
    assert str(picture(found)) in page


def test_numpy_in_bfloat16_is_left_out_and_no_failure() -> None:
    class Never:
        names, device = [MATMUL, "numpy"], "cpu"

        def ask(self, name: str, **job: Any) -> dict[str, Any]:
            raise bench.Failed("asked")

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    measured = bench.Measured(Never(), Silent())
    measured.run({**RUN, "dtype": "bfloat16"}, {}, 1)
    assert [(each["reason"], each["failed"]) for each in measured.left_out] == [
        ("asked", True),
        ("NumPy has no bfloat16 arithmetic", False),
    ]
    assert omissions({"left_out": measured.left_out[1:]}) == [
        "numpy, bfloat16, forward, T = 64: NumPy has no bfloat16 arithmetic"
    ]
    assert measured.results == [] and measured.gflops is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seq-len", "0"], "--seq-len 0: it must be from 1"),
        (["--seq-len", "many"], "--seq-len: invalid int value"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--impl", "numpi"], "numpi"),
        (["--dtype", "float64"], "float64"),
        (["--device", "gpu", "--impl", "jax"], "sees no GPU on this machine; use --device cpu\n"),
        (["--out", str(ROOT / "LICENSE")], "LICENSE: cannot be written to"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--out", str(tmp_path), *arguments]) == 2
    assert not list(tmp_path.iterdir())
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("name", ["benchmark.json", "benchmark.svg"])
def test_a_folder_in_the_place_of_a_result_is_told_before_anything_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert f"{name} is a folder there" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing_running_and_the_last_result(tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text("the last one")
    command = [sys.executable, "-m", "harness.bench", "--impl", "numpy", "--seq-len", "2", "--rounds", "5"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr and process.stderr.readline().startswith("T = 2, float32, forward: done in")
        workers = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "interrupted; the last result is as it was\n"
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert len(gone) == 3 and not alive
    assert [each.name for each in tmp_path.iterdir()] == ["benchmark.json"]
    assert (tmp_path / "benchmark.json").read_text() == "the last one"
