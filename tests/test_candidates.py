"""Somebody's own implementation, as a function and as trace files: the same gates, and whatever it does is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file
from test_artifact import document as example
from test_artifact import framework as entry

import harness
from harness import artifact, candidates, exchange, export
from harness.case import BadInput, seeded_case
from harness.gates import NAMES
from harness.report.markdown import markdown
from impls.spec import AttentionConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6)

PORT = r'''
import os
import sys
import time
import numpy as np
from impls import numpy_attention

def stages(weights, inputs, config):
    """The page, every stage and gradient."""
    trace = {}
    def observe(name, value):
        trace[name] = value
        return value
    y, cache = numpy_attention.forward(weights, inputs, config, observe)
    numpy_attention.backward(inputs["d_output"], cache, observe)
    return trace

def output(weights, inputs, config):
    return stages(weights, inputs, config)["output"]

def late(weights, inputs, config):
    """The norm after RoPE, returning nothing but its output; in a page of its own, since others run the page."""
    import importlib.util
    spec = importlib.util.spec_from_file_location("own_page", numpy_attention.__file__)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    norms = iter([weights["q_norm.weight"], weights["k_norm.weight"]])
    norm, rope = page.rms_norm, page.rope
    page.rms_norm = lambda x, w, eps: x
    page.rope = lambda x, cos, sin: norm(rope(x, cos, sin), next(norms), config.rms_norm_eps)
    return page.forward(weights, inputs, config)[0]

def single(weights, inputs, config):
    """Always in float32."""
    narrow = [{name: value.astype(np.float32) for name, value in each.items()} for each in (weights, inputs)]
    return output(*narrow, config)

def single_inside(weights, inputs, config):
    return single(weights, inputs, config).astype(inputs["d_output"].dtype)

def no_float64(weights, inputs, config):
    if inputs["d_output"].dtype == np.float64:
        raise TypeError("float32 only")
    return output(weights, inputs, config)

def lazy_jax(weights, inputs, config):
    """JAX is imported when it is called, and then needs its 64-bit mode."""
    import jax.numpy as jnp
    return jnp.asarray(output(weights, inputs, config))

def torch_tensor(weights, inputs, config):
    import torch
    return {"output": torch.from_numpy(output(weights, inputs, config)).requires_grad_()}

def cut(weights, inputs, config):
    """Small probabilities are left out, which moves no output by more than float32 rounds, in float64 throughout."""
    trace = stages(weights, inputs, config)
    B, T, N, H = trace["heads"].shape
    p = trace["probs"] * (trace["probs"] > 1e-6)
    v = np.repeat(trace["v_proj"], config.num_key_value_groups, axis=2)
    return np.einsum("bnts,bsnh->btnh", p, v).reshape(B, T, N * H) @ weights["o_proj.weight"].T

def softmax_inside(weights, inputs, config):
    """Its softmax alone is always in float32."""
    trace = stages(weights, inputs, config)
    B, T, N, H = trace["heads"].shape
    s = trace["masked_scores"].astype(np.float32)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    p = (e / e.sum(axis=-1, keepdims=True)).astype(inputs["d_output"].dtype)
    v = np.repeat(trace["v_proj"], config.num_key_value_groups, axis=2)
    return np.einsum("bnts,bsnh->btnh", p, v).reshape(B, T, N * H) @ weights["o_proj.weight"].T

def prints(weights, inputs, config):
    print("a line")
    os.write(1, b"another\n")
    return output(weights, inputs, config)

def writes(weights, inputs, config):
    y = output(weights, inputs, config)
    inputs["cos"] += 1
    weights["k_norm.weight"][0] = 0
    return y

def nan(weights, inputs, config):
    return output(weights, inputs, config) * np.nan

def wide(weights, inputs, config):
    return output(weights, inputs, config).astype(np.float64)

def misshapen(weights, inputs, config):
    return output(weights, inputs, config)[:, :-1]

def flat(weights, inputs, config):
    return output(weights, inputs, config).ravel()

def number(weights, inputs, config):
    return output(weights, inputs, config).dtype.type(1)

def lonely(weights, inputs, config):
    """A stage without what it is computed from."""
    trace = stages(weights, inputs, config)
    return {name: trace[name] for name in ("q_norm", "output")}

def long_line(weights, inputs, config):
    print("x" * 10_000)
    return output(weights, inputs, config)

def unknown(weights, inputs, config):
    return {"output": output(weights, inputs, config), "q_magic": np.ones(3, np.float32)}

def lacking(weights, inputs, config):
    return {"q_proj": stages(weights, inputs, config)["q_proj"]}

def integers(weights, inputs, config):
    return output(weights, inputs, config).astype(np.int64)

def nothing(weights, inputs, config):
    return None

def raises(weights, inputs, config):
    raise RuntimeError("boom")

def forks(weights, inputs, config):
    """Its child comes back, too."""
    if os.fork() == 0:
        time.sleep(0.1)
    return output(weights, inputs, config)

def starts_a_process(weights, inputs, config):
    """As a pool of them is, by fork: the child closes standard input, and so needs its lock."""
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
    child.start()
    child.join()
    return output(weights, inputs, config)

def reads(weights, inputs, config):
    assert sys.stdin.read() == ""
    return output(weights, inputs, config)

def empty(weights, inputs, config):
    return output(weights, inputs, config)[:0]

def metadata(weights, inputs, config):
    return {"output": output(weights, inputs, config), "__metadata__": np.ones(2, np.float32)}

def elsewhere(weights, inputs, config):
    return {"output": output(weights, inputs, config), "/../x.proj.weight": np.ones((2, 2), np.float32)}

def lowers_its_limits(weights, inputs, config):
    import resource
    y = output(weights, inputs, config)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    return y

def writes_to_every_descriptor(weights, inputs, config):
    for number in range(1, 20):
        try:
            os.write(number, b"not for you\n")
        except OSError:
            pass
    return output(weights, inputs, config)

def leaves_children(weights, inputs, config):
    import subprocess
    subprocess.Popen(["sleep", "54321"])
    os._exit(3)

def meddles(weights, inputs, config):
    """Makes the runner say that its trace lies where there is none."""
    sys.modules["__main__"]._keep = lambda *arguments: {"": "nowhere.safetensors"}
    return output(weights, inputs, config)

def crashes(weights, inputs, config):
    os.abort()

def leaves(weights, inputs, config):
    sys.exit(0)

def hangs(weights, inputs, config):
    import subprocess
    subprocess.Popen(["sleep", "65432"], start_new_session=True)
    time.sleep(1000)

def eats(weights, inputs, config):
    held = []
    while True:
        held.append(np.ones(2**24))
        time.sleep(0.01)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A port of one's own beside a tiny case."""
    folder = tmp_path_factory.mktemp("port")
    (folder / "port.py").write_text(PORT)
    seeded_case(folder / "case", config=CONFIG)
    return folder


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "harness.compare", "--weights", "case/seeded-0.safetensors", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    document = artifact.read(folder / "artifacts" / "attention_check.json")
    jsonschema.validate(document, artifact.SCHEMA)
    return done, document


def ask(*functions):
    return [word for name in functions for word in ("--candidate", f"port.py:{name}")]


def said(framework):
    first = framework["first_divergence"]
    return framework["error"] or (first and f"{first['stage']}: {first['explanation']}") or ""


@pytest.fixture(scope="module")
def verdicts(folder):
    """One run of all that can stand beside each other."""
    names = [line[4 : line.index("(")] for line in PORT.splitlines() if line.startswith("def ")]
    names = [name for name in names if name not in ("hangs", "eats")]
    done, document = run(folder, *ask(*names), "--rope", "model")
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    frameworks = {name.removeprefix("port.py:"): each for name, each in document["frameworks"].items()}
    rows = {}
    for row in document["checks"]:
        rows.setdefault(row["framework"].removeprefix("port.py:"), []).append(row)
    return frameworks, rows, done.stdout


RIGHT = [
    "stages",
    "output",
    "single",
    "single_inside",
    "softmax_inside",
    "no_float64",
    "lazy_jax",
    "torch_tensor",
    "prints",
    "forks",
    "starts_a_process",
    "reads",
    "lonely",
    "long_line",
]
WRONG = {
    "cut": "output: It is off by .* of its token's largest value; rounding stays below 1e-12",
    "late": "output: .* Likely cause: RMSNorm applied after RoPE",
    "writes": "cos, k_norm.weight: It writes into what it is given: cos, k_norm.weight.",
    "nan": "output: It holds NaN or infinity",
    "wide": "output: It is not float32",
    "misshapen": "output: It has another shape",
    "flat": "output: It has another shape",
    "number": "output: It has another shape|TypeError",
    "unknown": "q_magic: It is no stage of the layer",
    "lacking": "output: It was not returned",
    "integers": "TypeError: output holds int64 numbers",
    "nothing": "TypeError: it returned NoneType; expected the output array or a dict of stages",
    "raises": "RuntimeError: boom",
    "empty": "output: It has another shape",
    "metadata": "an entry __metadata__, which no tensor in a file can be called",
    "elsewhere": "x.proj.weight: It is no stage of the layer",
    "lowers_its_limits": "its trace cannot be written|its process was killed",
    "writes_to_every_descriptor": "its process was killed",
    "meddles": "output: It lies in a file that cannot be read",
    "leaves_children": "its process ended with status 3",
    "crashes": r"its process was killed \(SIGABRT\)",
    "leaves": "its process ended with status 0",
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_functions_match(verdicts, name):
    frameworks, rows, _ = verdicts
    assert frameworks[name]["match"], said(frameworks[name])
    gates = {row["gate"] for row in rows[name]}
    exact = name not in ("single", "single_inside", "softmax_inside", "no_float64")
    assert gates >= {"tolerance", "probes"} and ("structure" in gates) == exact
    assert ("local" in gates) == (name == "stages")
    stages = {row["stage"] for row in rows[name]}
    assert stages == (set(NAMES) if name == "stages" else {"q_norm", "output"} if name == "lonely" else {"output"})


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(verdicts, name):
    frameworks, _, out = verdicts
    assert not frameworks[name]["match"]
    assert re.search(WRONG[name], said(frameworks[name])), said(frameworks[name])
    assert f"port.py:{name}" in out


def test_what_could_not_be_checked_is_said(verdicts):
    frameworks, _, out = verdicts
    assert frameworks["stages"]["not_checked"] == []
    alone = "all but the output, which is all that it returned: stages and gradients"
    assert frameworks["output"]["not_checked"] == [alone]
    assert "given float64, it returns float32 (output)" in frameworks["single"]["not_checked"][1]
    assert "as what computes in float32 inside does" in frameworks["single_inside"]["not_checked"][1]
    assert "TypeError: float32 only" in frameworks["no_float64"]["not_checked"][1]
    assert "what it prints to standard output (16 lines: 'a line' …)" in frameworks["prints"]["not_checked"]
    assert len(frameworks["long_line"]["not_checked"][-1]) < 200
    lost = "local: q_norm, output: what they are computed from was not returned"
    assert lost in frameworks["lonely"]["not_checked"]
    assert "no gradient was shown" in " ".join(out.split())


def running(seconds):
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]


def test_what_a_candidate_leaves_behind_is_ended(verdicts):
    assert not running("54321")


def test_hanging_and_hungry_functions_are_ended_and_take_nobody_with_them(folder):
    arguments = ["--impl", "numpy", *ask("hangs", "eats"), "--time-limit", "25", "--memory-limit", "1.5"]
    done, document = run(folder, *arguments, "--rope", "model", "--dtype", "float32")
    assert done.returncode == 3, done.stdout + done.stderr
    assert document["frameworks"]["numpy"]["match"]
    errors = {name: each["error"] for name, each in document["frameworks"].items()}
    assert errors["port.py:hangs"] == "it took longer than 25 s for one run (--time-limit)"
    assert not running("65432")  # also what had left its group of processes
    assert errors["port.py:eats"] == "it held more than 1.5 GiB (--memory-limit)"


def test_what_a_module_misses_is_not_blamed_on_its_name(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        candidates.load("needy:f")


@pytest.mark.parametrize("result", [{"output": [1.0]}, {"output": None}, {3: np.ones(2)}, 1.5, "text", (1, 2)])
def test_what_is_no_array_is_refused(result):
    with pytest.raises(TypeError, match=r"expected an array of NumPy, JAX or PyTorch|keys are names of stages"):
        candidates.as_trace(result)


# ---------------------------------------------------------------------------------------------------------- from Python


def test_check_from_python(folder, monkeypatch, tmp_path):
    """Rows, and no exception where something differs; the case's files go elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    import port

    weights = folder / "case" / "seeded-0.safetensors"
    good = harness.check(port.output, weights, rope="model")
    assert good.match and all(row.match for row in good) and {row.framework for row in good} == {"output()", "hf-eager"}
    bad = harness.check(port.late, weights, rope="model", seq_len=5)
    assert not bad.match and any(not row.match for row in bad)
    assert "DIFFERS  late(): in its output, which is all that it returned" in str(
        bad
    ) and "RMSNorm applied after RoPE" in str(bad)
    broken = harness.check(port.raises, weights, dtype="float32", rope="model")
    assert not broken.match and "DID NOT RUN  raises(): RuntimeError: boom" in str(broken)
    with pytest.raises(BadInput, match=r"gone\.safetensors: no such file"):
        harness.check(port.output, "gone.safetensors")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- trace files


@pytest.fixture(scope="module")
def kit(folder):
    """What a port in another language is given."""
    done = export.main(
        [
            "--weights",
            str(folder / "case/seeded-0.safetensors"),
            "--out",
            str(folder / "w"),
            "--case",
            str(folder / "kit"),
        ]
    )
    assert done == 0
    return folder / "kit"


def answer(kit, into, only=""):
    """A program that knows nothing but the kit: it reads case.json and the files, and writes files."""
    told = json.loads((kit / "case.json").read_text())
    config = AttentionConfig(**told["config"])
    sys.path.insert(0, str(kit.parent))
    import port

    into.mkdir()
    for each in told["runs"]:
        if only in each["run"]:
            weights, inputs = load_file(kit / each["weights"]), load_file(kit / each["inputs"])
            assert {name: list(value.shape) for name, value in weights.items()} == {
                name: entry["shape"] for name, entry in told["weights"].items()
            }
            trace = port.stages(weights, inputs, config)
            save_file(
                {name: np.ascontiguousarray(value) for name, value in trace.items()},
                into / f"{each['run']}.safetensors",
            )
    return told


def test_trace_files_are_judged_by_every_gate(folder, kit, tmp_path):
    told = answer(kit, tmp_path / "answers")
    assert [entry["name"] for entry in told["stages"]] == list(NAMES)
    assert len(told["runs"]) == 2 * 2 * 2 + 4
    done, document = run(folder, "--trace", str(tmp_path / "answers"), "--impl", "numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    (name,) = set(document["frameworks"]) - {"numpy"}
    assert name == f"{(tmp_path / 'answers').as_posix()}/"
    gates = {row["gate"] for row in document["checks"] if row["framework"] == name}
    assert gates == {"structure", "local", "tolerance", "probes"}
    assert document["frameworks"][name]["not_checked"] == []
    assert (tmp_path / "answers" / "chapter.model.float32.safetensors").exists()


def test_wrong_trace_file_is_named(folder, kit, tmp_path):
    answer(kit, tmp_path / "answers", "chapter.model.float32")
    path = tmp_path / "answers" / "chapter.model.float32.safetensors"
    trace = load_file(path)
    trace["q_norm"] = trace["q_norm"] * np.float32(1.001)
    save_file(trace, path)
    done, document = run(folder, "--trace", str(path), "--rope", "model")
    assert done.returncode == 1, done.stdout + done.stderr
    (framework,) = document["frameworks"].values()
    assert framework["first_divergence"]["stage"] == "q_norm"
    assert "structure: no trace of 2 of 2 runs in float64" in framework["not_checked"]


def test_kit_in_bfloat16(folder, tmp_path):
    case = seeded_case(tmp_path, config=CONFIG)
    files = exchange.write(case, ["bfloat16"], tmp_path / "kit")
    assert {path.name for path in files} >= {"weights.bfloat16.safetensors", "stress.neutral.bfloat16.safetensors"}
    given = load_file(tmp_path / "kit" / "chapter.model.bfloat16.safetensors")
    assert {value.dtype.name for value in given.values()} == {"bfloat16"}


# -------------------------------------------------------------------------------------------------- the command's views


def test_rejudge_json_and_summary(folder, tmp_path, monkeypatch):
    """Saved traces judged anew give the same figures; JSON alone on standard output; a summary for GitHub."""
    _, before = run(folder, "--impl", "numpy", "--keep-all", "--rope", "model")
    stamp = (folder / "artifacts" / "attention_check.json").read_bytes()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done, _ = run(folder, "--rejudge", "artifacts", "--json", "-")
    assert done.returncode == 0 and not done.stderr
    again = json.loads(done.stdout)
    jsonschema.validate(again, artifact.SCHEMA)
    assert (folder / "artifacts" / "attention_check.json").read_bytes() == stamp
    kept = [row for row in before["checks"] if row["gate"] in ("structure", "local", "tolerance")]
    assert [row for row in again["checks"] if row["gate"] != "precision"] == kept
    assert again["environment"] == before["environment"]
    assert "### Attention check: match" in (tmp_path / "summary.md").read_text()


def test_markdown_leaves_no_sign_unescaped():
    text = markdown(example(frameworks={"a|b<script>`": entry()}, match=True, exit_status=0))
    assert "a\\|b\\<script\\>\\`" in text
