"""The command, end to end: what a user types, what is printed and written, and the exit status."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file

from harness import artifact, bugs, compare
from harness.case import seeded_case
from harness.gates import NAMES
from harness.judging import Judging
from harness.report.console import Progress, make_console
from harness.runners import PROBES, Setting, Unusable
from harness.workers import Limits, Workers
from impls.spec import STAGES, AttentionConfig

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """python -m harness.compare in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "harness.compare", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def read(folder: Path) -> dict[str, Any]:
    """The artifact of a run, held to the schema."""
    document = artifact.read(folder / "artifacts" / "attention_check.json")
    jsonschema.validate(document, artifact.SCHEMA)
    return document


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints as save_pretrained writes them: tiny, and of Qwen3-0.6B's widths; two layers, trained-like norms."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints")
    widths = {
        "tiny": {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
        "wide": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    }
    for name, sizes in widths.items():
        torch.manual_seed(0)
        config = Qwen3Config(
            **sizes, num_hidden_layers=2, intermediate_size=64, vocab_size=50, rope_theta=1e6, initializer_range=0.03
        )
        model = Qwen3ForCausalLM(config)
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                torch.nn.init.normal_(norm.weight, 1.5, 0.5)
        model.save_pretrained(folder / f"{name}-float32-sharded", max_shard_size="20KB" if name == "tiny" else "8MB")
        model.bfloat16().save_pretrained(folder / f"{name}-bfloat16-single")
    return folder


def test_default_run(tmp_path: Path) -> None:
    """The command without arguments, run once for all that must be true of it."""
    folder = tmp_path
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    is_a_match(read(folder))
    checks_everything(read(folder))
    leaves_small_traces(folder / "artifacts")
    is_read_in_five_seconds(done.stdout)
    is_json_proper((folder / "artifacts" / "attention_check.json").read_text())


# ------------------------------------------------------------------------------------------------------------ it holds


def is_json_proper(text: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse)
    assert str(Path.home()) not in text and str(ROOT) not in text


def is_a_match(document: dict[str, Any]) -> None:
    assert document["match"] and document["exit_status"] == 0
    assert set(document["frameworks"]) == {"numpy", "jax", "torch"}
    assert document["weights"]["source"]["kind"] == "seeded"
    assert "not Qwen's trained weights" in document["weights"]["description"]
    assert set(document["inputs"]) == {"chapter", "stress"}
    for name, framework in document["frameworks"].items():
        assert framework["match"] and framework["error"] is None and framework["first_divergence"] is None
        assert 1e-8 < framework["max_abs_diff"] < 1e-5, name
        assert framework["max_abs_diff"] <= framework["tolerance"]["max_abs"]
        assert 0.05 < framework["tolerance"]["largest_share"] < 1
        assert framework["structure"] < 1e-13
    assert document["max_abs_diff"] == max(each["max_abs_diff"] for each in document["frameworks"].values())
    assert set(document["pairwise"]) == {"numpy/jax", "numpy/torch", "jax/torch"}
    assert document["environment"]["matmul_bits"] == dict.fromkeys(("numpy", "jax", "torch", "hf-eager"), 24)
    variances = [each["unscaled"]["variance"] / each["d_k"] for each in document["scaling"]["head_sizes"]]
    assert 0.9 < min(variances) <= max(variances) < 1.1


def checks_everything(document: dict[str, Any]) -> None:
    """Every stage and gradient, each framework, input and RoPE mode, in float64 and in float32, by every gate."""
    rows = {
        (row["framework"], row["against"], row["input"], row["rope"], row["stage"], row["measure"])
        for row in document["checks"]
    }
    for framework in ("numpy", "jax", "torch"):
        for input_ in ("chapter", "stress"):
            for rope in ("neutral", "model"):
                scene = (input_, rope)
                for name in NAMES:
                    assert (framework, "truth", *scene, name, "relative") in rows
                    for against in ("truth", "hf-eager"):
                        assert {(framework, against, *scene, name, m) for m in ("rms", "max/sigma")} <= rows
                assert (framework, "jacobian", *scene, "d_masked_scores", "jacobian") in rows
            scene = (input_, "model")
            assert {(framework, "own inputs", *scene, name, m) for name in NAMES for m in ("bound", "bits")} <= rows
        for probe in PROBES:
            assert {(framework, "exact", probe.input, "model", name, "exact") for name in NAMES} <= rows


def leaves_small_traces(artifacts: Path) -> None:
    (folder,) = (artifacts / "traces").iterdir()
    assert folder == artifacts / artifact.read(artifacts / "attention_check.json")["traces"]
    traces = list(folder.iterdir())
    assert sum(path.stat().st_size for path in traces) < 50e6
    assert {path.name.split(".")[0] for path in traces} == {"numpy", "jax", "torch", "hf-eager"}
    trace = load_file(folder / "numpy.layer0.stress.model.float32.safetensors")
    assert trace["q_norm"].shape == (1, 12, 16, 128) and trace["d_hidden_states"].dtype == np.float32
    assert set(trace) == {name for name in NAMES if not name.endswith("proj.weight")}
    left = {path.name for path in artifacts.iterdir()}
    assert left == {"attention_check.json", "report.html", "traces"}


def is_read_in_five_seconds(text: str) -> None:
    for words in ("made up, not the trained ones", "MATCH", "only rounding differs", "artifacts/attention_check.json"):
        assert words in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize("name", ["tiny-float32-sharded", "tiny-bfloat16-single", "wide-bfloat16-single"])
def test_checkpoint(checkpoints: Path, tmp_path: Path, name: str) -> None:
    """Layers 0 and 1 of a checkpoint (of a large one, its last), whatever its dtype and however many files it has."""
    all_of_them = ["numpy", "jax", "torch", "hf-sdpa"]
    names, layers = (["numpy"], [1]) if name.startswith("wide") else (all_of_them, [0, 1])
    asked = ["--weights", str(checkpoints / name), "--layer", *map(str, layers), "--rope", "model", "--impl", *names]
    done = run(tmp_path, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    document = read(tmp_path)
    assert document["layers"] == layers and {row["layer"] for row in document["checks"]} == set(layers)
    assert document["weights"]["source"]["kind"] == "checkpoint"
    assert document["weights"]["source"]["dtype"] == name.split("-")[1]
    assert name in done.stdout


def test_all_layers_keep_the_traces_of_the_first_and_of_those_that_differ(checkpoints: Path, tmp_path: Path) -> None:
    weights = ["--weights", str(checkpoints / "tiny-bfloat16-single"), "--layer", "all", "--rope", "model"]
    done = run(tmp_path, *weights, "--impl", "numpy", "--dtype", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path)["layers"] == [0, 1]
    traces = tmp_path / "artifacts" / "traces"
    assert {path.name.split(".")[1] for path in traces.glob("*/*")} == {"layer0"}
    done = run(tmp_path, *weights, "--impl", "numpy:scale_left_out", "--dtype", "float32")
    assert done.returncode == 1 and {path.name.split(".")[1] for path in traces.glob("*/*")} == {"layer0", "layer1"}


def test_batch_length_and_one_framework(checkpoints: Path, tmp_path: Path) -> None:
    weights = str(checkpoints / "tiny-float32-sharded")
    arguments = ["--weights", weights, "--impl", "numpy", "--batch", "3", "--seq-len", "1", "--dtype", "float64"]
    done = run(tmp_path, *arguments, "--keep-all", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    document = read(tmp_path)
    assert (document["batch_size"], document["seq_len"]) == (3, 1)
    assert document["frameworks"]["numpy"]["tolerance"] is None
    assert document["frameworks"]["numpy"]["not_checked"] == [
        "local, tolerance: float32 was not asked for",
        "probes: float32 was not asked for",
    ]
    trace = load_file(tmp_path / "artifacts" / document["traces"] / "numpy.layer0.chapter.model.float64.safetensors")
    assert set(trace) == set(NAMES)


# --------------------------------------------------------------------------------------------------- wrong things fail

KINDS = sorted(
    {bug.kind: bug.name for bug in bugs.BUGS if "numpy" in bug.frameworks and "bias" not in bug.name}.values()
)


def test_planted_bug_of_each_kind_ends_in_exit_status_1(checkpoints: Path, tmp_path: Path) -> None:
    """Each as an implementation of its own, in one run; every other bug stands before every gate in test_planted.py."""
    names = [f"numpy:{bug}" for bug in KINDS]
    done = run(tmp_path, "--weights", str(checkpoints / "tiny-float32-sharded"), "--impl", *names)
    assert done.returncode == 1, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    for name, framework in read(tmp_path)["frameworks"].items():
        assert artifact.exit_status({name: framework}) == 1
        first = framework["first_divergence"]
        assert first["stage"] in bugs.find("numpy", name.removeprefix("numpy:")).stages, name
        assert f"DIFFERS {name}: first at {first['stage']}" in words


def test_at_least_ten_kinds_are_planted() -> None:
    assert len(KINDS) >= 10


def test_bug_in_one_framework_leaves_the_verdict_of_the_others(checkpoints: Path, tmp_path: Path) -> None:
    weights = str(checkpoints / "tiny-float32-sharded")
    planted = ["jax:norm_one_plus_weight", "torch:rope_left_out_for_k"]
    done = run(tmp_path, "--weights", weights, "--impl", "numpy", *planted)
    assert done.returncode == 1, done.stdout + done.stderr
    document = read(tmp_path)
    assert {name: each["match"] for name, each in document["frameworks"].items()} == {
        "numpy": True,
        "jax:norm_one_plus_weight": False,
        "torch:rope_left_out_for_k": False,
    }
    assert document["frameworks"]["torch:rope_left_out_for_k"]["first_divergence"]["equation"] == "RoPE"
    assert not document["match"] and not document["pairwise"]["numpy/jax:norm_one_plus_weight"]["match"]


# --------------------------------------------------------------------------------------------- what cannot run, and how


def test_framework_that_is_missing_is_reported_and_the_others_judged(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "flax").mkdir(parents=True)
    (tmp_path / "hidden" / "flax" / "__init__.py").write_text("raise ImportError('No module named flax')")
    weights = str(checkpoints / "tiny-float32-sharded")
    done = run(tmp_path, "--weights", weights, "--impl", "numpy", "jax", PYTHONPATH=f"{tmp_path / 'hidden'}:{ROOT}")
    assert done.returncode == 3, done.stdout + done.stderr
    frameworks = read(tmp_path)["frameworks"]
    assert frameworks["numpy"]["match"] and not frameworks["jax"]["match"]
    assert "No module named flax" in frameworks["jax"]["error"]
    assert "DID NOT RUN  jax: ImportError: No module named flax" in done.stdout
    assert "MATCH  numpy" in done.stdout


def test_reference_that_cannot_run_leaves_the_last_artifact(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "transformers").mkdir(parents=True)
    (tmp_path / "hidden" / "transformers" / "__init__.py").write_text("raise ImportError('No transformers here')")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "attention_check.json").write_text("the last one")
    weights = str(checkpoints / "tiny-float32-sharded")
    done = run(tmp_path, "--weights", weights, "--impl", "numpy", PYTHONPATH=f"{tmp_path / 'hidden'}:{ROOT}")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and "No transformers here" in done.stderr
    assert (tmp_path / "artifacts" / "attention_check.json").read_text() == "the last one"


def test_an_implementation_that_ends_before_its_job_says_why(tmp_path: Path) -> None:
    """Before the case was made, on a machine under load."""
    case = seeded_case(tmp_path, config=AttentionConfig(8, 2, 1, 4, 1e-6), seq_len=3)
    quiet = Progress(make_console(), quiet=True)
    with Workers(["torch"], "gpu", Limits(60, 16), quiet) as workers:
        for worker in workers.workers:
            worker.process.wait(60)
        judge = cast(Judging, SimpleNamespace(answers={}, rows=None, folder=tmp_path))
        with pytest.raises(Unusable, match="sees no GPU on this machine"):
            workers.run(case, [Setting("chapter", "model", "float32")], judge, tmp_path)


DAMAGE = {
    "raises": ("module = attention(weights, config, device, layer)", "raise RuntimeError('boom')"),
    "returns NaN": (
        "    return {name: array",
        '    traced["output"] = traced["output"] * float("nan")\n    return {name: array',
    ),
    "lacks a stage": ("    return {name: array", '    del traced["q_norm"]\n    return {name: array'),
    "computes in float64": (".view(getattr(torch, array.dtype.name))", ".double()"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_implementation_takes_nobody_with_it(checkpoints: Path, tmp_path: Path, damage: str) -> None:
    """A copy of the code whose PyTorch implementation fails in one way: NumPy keeps its verdict."""
    old, new = DAMAGE[damage]
    for part in ("impls", "harness"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "impls" / "torch_attention.py"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    weights = str(checkpoints / "tiny-float32-sharded")
    done = run(tmp_path, "--weights", weights, "--impl", "numpy", "torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == (3 if damage == "raises" else 1), done.stdout + done.stderr
    assert not done.stderr
    frameworks = read(tmp_path)["frameworks"]
    assert frameworks["numpy"]["match"] and not frameworks["torch"]["match"]
    if damage == "raises":
        assert frameworks["torch"]["error"] == "RuntimeError: boom"
    else:
        assert frameworks["torch"]["first_divergence"]["explanation"]


def test_wrong_numpy_page_neither_excuses_nor_blames(checkpoints: Path, tmp_path: Path) -> None:
    """Rounding noise is drawn from the page: where that is wrong, no tolerance is derived, and that is said."""
    for part in ("impls", "harness"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "impls" / "numpy_attention.py"
    path.write_text(path.read_text().replace("np.repeat(x_BSKH, G, axis=2)", "np.tile(x_BSKH, (1, 1, G, 1))"))
    weights = str(checkpoints / "tiny-float32-sharded")
    done = run(tmp_path, "--weights", weights, "--impl", "numpy", "torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    frameworks = read(tmp_path)["frameworks"]
    assert frameworks["torch"]["match"] and frameworks["numpy"]["first_divergence"]["stage"] == "scores"
    assert "the NumPy page, from which rounding noise is drawn, is not the layer" in str(
        frameworks["torch"]["not_checked"]
    )


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an artifact from before, which must be the same afterwards, and nothing beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "attention_check.json").write_text("the last one")
    yield tmp_path
    assert (tmp_path / "artifacts" / "attention_check.json").read_text() == "the last one"
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["attention_check.json"]


def children(pid: int) -> list[int]:
    """The processes that this one started and that still run."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list a process's children")
@pytest.mark.parametrize(("what", "workers"), [(signal.SIGINT, 1), (signal.SIGINT, 4), (signal.SIGTERM, 4)])
def test_interrupt_ends_all_processes_and_leaves_the_last_artifact(untouched: Path, what: int, workers: int) -> None:
    """At once: while the workers are being started, and while they import and noise is drawn for a long sequence."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.compare", "--seq-len", "400"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            until = time.monotonic() + 60
            while len(started := children(process.pid)) < workers and time.monotonic() < until:
                time.sleep(0.01)
            assert len(started) >= workers
            time.sleep(0 if workers == 1 else 2)
            started = children(process.pid)
            process.send_signal(what)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130 and err == "interrupted; the last artifact is as it was\n"
    until = time.monotonic() + 5
    while any(map(running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(running, started))


def test_reader_that_goes_away_is_no_traceback(checkpoints: Path, tmp_path: Path) -> None:
    weights = str(checkpoints / "tiny-float32-sharded")
    done = subprocess.run(
        f"{sys.executable} -m harness.compare --weights {weights} --impl numpy | head -c 1",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""


def test_list_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(stage.name in out for stage in STAGES) and "torch:rope_negative_sine" in out and "hf-sdpa" in out
    with pytest.raises(SystemExit, match="0"):
        compare.main(["--version"])
    assert capsys.readouterr().out.startswith("attention-check ")
