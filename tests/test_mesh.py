"""A layer spread over devices: the same layer; what devices send; its mistakes; processes that die and hang."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import Case, make_case, numpy_run

from harness import artifact, bugs, mesh, planted
from harness.case import BadInput, seeded_case
from harness.gates import ROUNDING, local, structure, whole
from harness.gates import tolerance as tolerances
from harness.runners import load
from impls import numpy_attention
from impls.spec import BIASES, STAGES, WEIGHTS, AttentionConfig, cut

ROOT = Path(__file__).resolve().parent.parent
CONFIG = AttentionConfig(40, 16, 8, 16, 1e-6)
MESHES = {
    "heads=8": (8, 1, 1),
    "heads=4,sequence=2": (4, 2, 1),
    "heads=2,sequence=4": (2, 4, 1),
    "sequence=8": (1, 8, 1),
}


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jax@", "--mesh : '' is no axis of jax's mesh, or a second one; there are heads, sequence, batch"),
        ("jax@heads", "--mesh heads: 'heads' needs a whole number of devices, as in heads=2"),
        ("jax@heads=0", "--mesh heads=0: 'heads=0' needs a whole number of devices, as in heads=2"),
        ("jax@heads=-2", "'heads=-2' needs a whole number"),
        ("jax@heads=2.5", "'heads=2.5' needs a whole number"),
        ("jax@heads=2,heads=2", "'heads=2' is no axis of jax's mesh, or a second one"),
        ("jax@head=2", "'head=2' is no axis of jax's mesh, or a second one; there are heads, sequence, batch"),
        ("jax@heads=3,processes=2", "3 devices cannot be divided among 2 processes"),
        ("jax@heads=8,sequence=9", "72 devices; at most 64 are spread over"),
        ("torch@heads=9999", "9,999 devices; at most 64"),
        ("torch@sequence=2", "--world-size sequence=2: 'sequence=2' is no axis of torch's mesh, or a second one"),
        ("torch@heads=x", "'heads=x' needs a whole number"),
        ("numpy@heads=2", "only jax and torch can be spread over devices"),
    ],
)
def test_a_name_that_says_no_plan_is_refused(name, says):
    with pytest.raises(BadInput) as refused:
        mesh.parse(name)
    assert says in str(refused.value)


def test_a_name_says_the_plan():
    assert mesh.parse("jax@heads=4,sequence=2") == mesh.Plan("jax", {"heads": 4, "sequence": 2})
    assert mesh.parse("jax@batch=2,processes=2:all_reduce_twice") == mesh.Plan(
        "jax", {"batch": 2}, 2, "all_reduce_twice"
    )
    assert mesh.parse("torch@heads=4") == mesh.Plan("torch", {"heads": 4}, 4)
    assert [mesh.spread(name) for name in ("jax@heads=2", "torch@heads=2", "jax", "a@b.py:f")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("N", "K", "heads", "says"),
    [
        (16, 8, 3, "16 query heads cannot be divided among 3 devices; choose a divisor of 16"),
        (16, 8, 32, "16 query heads cannot be divided among 32 devices"),
        (12, 6, 4, "6 key/value heads cannot be divided among 4 devices; choose a divisor of 6"),
        (16, 8, 16, "8 key/value heads cannot be divided among 16 devices"),
        (16, 8, 8, None),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(N, K, heads, says):
    config = AttentionConfig(32, N, K, 8, 1e-6)
    if says is None:
        mesh.check(f"jax@heads={heads}", config)
        return
    with pytest.raises(BadInput, match=says):
        mesh.check(f"jax@heads={heads}", config)


def test_what_one_process_tells_another_arrives():
    """Also through a message of nothing, which is what the others say."""
    case = make_case(AttentionConfig(20, 6, 3, 8, 1e-5, attention_bias=True), 2, 3)
    message = mesh.packed("run", *case)
    what, (weights, inputs, d_output, config) = mesh.unpacked(message)
    assert (what, config) == ("run", case.config) and weights.keys() == case.weights.keys()
    assert all(np.array_equal(weights[name], value) for name, value in case.weights.items())
    assert all(np.array_equal(inputs[name], value) for name, value in case.inputs.items())
    assert np.array_equal(d_output, case.d_output)


def test_one_table_says_what_is_cut():
    """W_Q, W_K and W_V by their columns, W_O by its rows (Hugging Face stores them transposed); no array twice."""
    weights = {name: cut(letters) for name, letters in (WEIGHTS | BIASES).items()}
    assert weights["q_proj.weight"] == weights["k_proj.weight"] == weights["v_proj.weight"] == ("heads", None)
    assert weights["o_proj.weight"] == (None, "heads") and weights["q_norm.weight"] == weights["o_proj.bias"] == (None,)
    assert weights["q_proj.bias"] == ("heads",)
    stages = {stage.name: cut(stage.shape) for stage in STAGES}
    assert stages["k_rope"] == ("batch", "sequence", "heads", None)
    assert stages["scores"] == ("batch", "heads", "sequence", None)
    assert all(len(set(axes) - {None}) == len([axis for axis in axes if axis]) for axes in stages.values())


# ------------------------------------------------------------------------------------------------------- the same layer


def jax_run(axes, case):
    """One run over a mesh of the test's own eight devices."""
    import jax

    from impls import jax_mesh

    return jax_mesh.run(*case, jax_mesh.make_mesh(jax.devices("cpu"), **axes))


@pytest.mark.parametrize("said", [*MESHES, "batch=2", "batch=2,sequence=2,heads=2"])
@pytest.mark.parametrize("biases", [False, True])
def test_it_is_the_layer(said, biases):
    """In float64, every stage and gradient, of 13 tokens and 3 sequences, which no mesh divides."""
    axes, config = mesh.parse(f"jax@{said}").axes, AttentionConfig(40, 16, 8, 16, 1e-6, biases)
    case = make_case(config, 3, 13)
    trace, truth = jax_run(axes, case), numpy_run(*case)
    assert set(trace) == set(truth) == set(whole(config))
    findings = structure.judge(trace, truth, case.weights, case.inputs, config, whole(config))
    assert findings and all(finding.match for finding in findings), [each for each in findings if not each.match][:3]


@pytest.mark.parametrize("said", MESHES)
def test_only_rounding_differs_in_float32(said):
    """Gates L and T, with the limits of the layer on one device."""
    exact = make_case(CONFIG, 1, 16, rope="model").astype(np.float32).astype(np.float64)
    trace = jax_run(mesh.parse(f"jax@{said}").axes, exact.astype(np.float32))
    noise = tolerances.sample(numpy_attention.forward, numpy_attention.backward, *exact)
    truth = load("hf-eager").run(*exact)
    findings = tolerances.judge(trace, truth, noise, whole(CONFIG), False, False, "float32")
    factors = {name: local.factor(value) for name, value in exact.weights.items()}
    findings += local.judge(trace, factors, exact.inputs, exact.d_output, CONFIG, ROUNDING["float32"])
    assert len(findings) > 100 and all(finding.match for finding in findings), [f for f in findings if not f.match][:3]


def test_one_token_is_enough():
    case = make_case(CONFIG, 1, 1)
    trace, truth = jax_run({"batch": 2, "sequence": 4}, case), numpy_run(*case)
    findings = structure.judge(trace, truth, case.weights, case.inputs, CONFIG, whole(CONFIG))
    assert findings and all(finding.match for finding in findings)


def test_a_padded_batch_is_the_layer_too(tmp_path):
    padded = seeded_case(tmp_path, config=CONFIG, seq_len=13, batch=2, left_pad=(0, 3))
    case = Case(*padded.arrays("stress", "model", "float64"), CONFIG)
    trace, truth = jax_run({"heads": 2, "sequence": 2, "batch": 2}, case), load("hf-eager").run(*case)
    findings = structure.judge(trace, truth, case.weights, case.inputs, CONFIG, whole(CONFIG))
    assert findings and all(finding.match for finding in findings)


def test_more_devices_round_otherwise():
    """Not bit for bit, for the sums are cut elsewhere: it was really spread."""
    case = make_case(CONFIG, 1, 16).astype(np.float32)
    outputs = [jax_run(mesh.parse(f"jax@{said}").axes, case)["output"] for said in ("heads=1", "heads=2", "heads=8")]
    assert not np.array_equal(outputs[0], outputs[2])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-5 * np.abs(outputs[0]).max())


# ---------------------------------------------------------------------------------------------- what the devices send


@pytest.mark.parametrize("said", MESHES)
def test_what_devices_send_is_what_the_plan_needs(said):
    """One all-reduce of the output and of its input's gradient; keys and values gathered, their gradients scattered."""
    import jax

    from impls import jax_mesh

    h, s, _ = MESHES[said]
    T, (D, KH) = 16, (CONFIG.hidden_size, CONFIG.num_key_value_heads * CONFIG.head_dim)
    case = make_case(CONFIG, 1, T).astype(np.float32)
    axes = mesh.parse(f"jax@{said}").axes
    programs = jax_mesh.programs(*case, jax_mesh.make_mesh(jax.devices("cpu"), **axes))
    found = mesh.by_pass((mesh.sent(text, 8) for text in programs), T)
    reduced, gathered = {"all-reduce": 4.0 * 2 * (h - 1) * D}, 4.0 * 2 * (s - 1) * KH
    forward, hidden, weights = (found[name] for name in mesh.PASSES)
    assert forward == {k: n for k, n in {**reduced, "all-gather": gathered}.items() if n}
    assert hidden == {k: n for k, n in {**reduced, "reduce-scatter": gathered}.items() if n}
    norms, matrices = 2 * CONFIG.head_dim, sum(w.size for n, w in case.weights.items() if "proj" in n)
    assert weights["all-reduce"] == pytest.approx(4 * 2 * (7 * norms + (s - 1) * matrices))


@pytest.mark.parametrize(
    ("line", "bytes"),
    [
        ("%a = f32[2,16]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", 4 * 2 * 0.5 * 128),
        ("%a = (f32[2,16]{1,0}, f64[4]{0}) all-reduce(%x, %y), replica_groups=[1,4]<=[4]", 4 * 2 * 0.75 * 160),
        ("%a = bf16[8]{0} all-gather(%x), replica_groups={}, dimensions={0}", 4 * 0.75 * 16),
        ("%a = f32[8]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}", 4 * 3 * 32),
        ("%a = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 4 * 32),
        ("%a = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1,2,3}}", 4 * 1.5 * 32),
        ("%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}", 4 * 0.75 * 32),
        ("%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}", 4 * 32),
        ("%a = f32[8]{0} all-reduce-done(%b)", 0),
        ("%a = f32[8]{0} add(%all-reduce, %b)", 0),
    ],
)
def test_bytes_are_read_from_the_programs_text(line, bytes):
    assert sum(mesh.sent(line, 4).values()) == bytes


# ---------------------------------------------------- its own mistakes (tests/test_planted.py has all of one process)


def test_a_bias_that_every_device_adds_is_caught(tmp_path):
    config = AttentionConfig(40, 16, 8, 16, 1e-6, attention_bias=True)
    bug = bugs.find("jax-mesh", "o_bias_on_every_device")
    assert not bug.possible(CONFIG)
    (row,) = planted.matrix(seeded_case(tmp_path, config=config), [("jax-mesh", bug)])["bugs"]
    assert row["gates"]["S"] and row["stage"] == "output"


# ------------------------------------------------------------------------------------------------ processes, for real


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return seeded_case(tmp_path_factory.mktemp("weights"), config=CONFIG, seq_len=5).paths["weights"]


def command(weights: Path, out: Path, *arguments: str) -> list[str]:
    case = ["--weights", str(weights), "--seq-len", "5", "--out", str(out)]
    return [sys.executable, "-m", "harness.compare", *case, *arguments]


def family(process: psutil.Process) -> list[psutil.Process]:
    """The other processes of its groups."""
    return [each for each in process.children(recursive=True) if "harness.mesh" in " ".join(each.cmdline())]


def test_two_processes_over_the_loopback(tmp_path, weights):
    """jax.distributed and gloo: the correct layer matches, and mistakes of one process are named."""
    broken = {f"torch@heads=2:{name}" for name in bugs.names("torch-mesh")}
    assert len(broken) == 4
    names = ["jax@heads=2,sequence=2,processes=2", "torch@heads=2", *sorted(broken)]
    done = subprocess.run(command(weights, tmp_path, "--impl", *names), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    document = artifact.read(tmp_path / "attention_check.json")
    assert artifact.fault(document) is None
    assert {name for name, each in document["frameworks"].items() if not each["match"]} == broken
    for name in broken:
        (declared,) = (bug.stages for bug in bugs.BUGS if bug.frameworks == ("torch-mesh",) and bug.name in name)
        assert document["frameworks"][name]["first_divergence"]["stage"] in declared
    sent = document["frameworks"]["torch@heads=2"]["exchanged"]
    assert sent["forward, a token"] == {"all-reduce": 4 * 2 * CONFIG.hidden_size}
    assert sent["hidden states' gradient, a token"] == sent["forward, a token"]
    assert sent == document["frameworks"]["torch@heads=2:heads_on_wrong_device"]["exchanged"]
    assert "all-gather" in document["frameworks"][names[0]]["exchanged"]["forward, a token"]
    assert "forward, a token" in done.stdout and "all-reduce" in (tmp_path / "report.html").read_text()
    assert {row["gate"] for row in document["checks"]} >= {"structure", "local", "tolerance", "probes", "precision"}


def test_a_process_that_somebody_started_elsewhere_is_waited_for(tmp_path, weights):
    """As on several hosts: README's commands."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = [sys.executable, "-m", "harness.mesh", "torch@heads=2"]
    with subprocess.Popen(words, cwd=ROOT, env={**place, "RANK": "1"}, stderr=subprocess.PIPE) as elsewhere:
        run = command(weights, tmp_path, "--impl", "torch@heads=2", "--time-limit", "60")
        done = subprocess.run(run, cwd=ROOT, env=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        elsewhere.wait(timeout=20)  # it ends when the first process has gone


def test_a_process_that_dies_or_hangs_ends_its_run_and_nothing_is_left(tmp_path, weights):
    arguments = ["--impl", "numpy", "jax@heads=2,processes=2", "torch@heads=2", "--time-limit", "12"]
    running = subprocess.Popen(
        command(weights, tmp_path, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process, others = psutil.Process(running.pid), []
    until = time.monotonic() + 60
    while len(others) < 2 and time.monotonic() < until:
        others = family(process)
        time.sleep(0.05)
    everything = process.children(recursive=True)
    for each in others:
        kills = "jax@" in " ".join(each.cmdline())
        each.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
    out, error = running.communicate(timeout=90)
    assert running.returncode == 3, error
    frameworks = artifact.read(tmp_path / "attention_check.json")["frameworks"]
    assert frameworks["numpy"]["match"]
    assert "process 1 of 2 was killed (SIGKILL)" in frameworks["jax@heads=2,processes=2"]["error"]
    assert frameworks["torch@heads=2"]["error"] == "it took longer than 12 s for one run (--time-limit)"
    assert "DID NOT RUN" in out
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_the_command_refuses_a_plan_in_one_line(tmp_path, weights):
    for arguments, says in (
        (["--mesh", "heads=3"], "error: jax@heads=3: 16 query heads cannot be divided among 3 devices"),
        (["--mesh", "heads=2", "--dtype", "bfloat16"], "error: --dtype bfloat16: jax@heads=2 is judged in float64 and"),
        (["--mesh", "rows=3"], "error: --mesh rows=3: 'rows=3' is no axis of jax's mesh"),
        (["--world-size", "0"], "error: --world-size heads=0: 'heads=0' needs a whole number"),
        (["--impl", "jax@heads=2:eps_1e-5"], "error: --impl jax@heads=2:eps_1e-5: no such implementation"),
        (["--impl", "jax@heads=2:"], "error: --impl jax@heads=2:: no such implementation"),
        (["--impl", "jax-tiled@heads=2"], "error: --impl jax-tiled@heads=2: only jax and torch can be spread"),
        (["--mesh", "heads=2", "--mesh", "heads=2"], "error: --impl jax@heads=2: named twice"),
    ):
        done = subprocess.run(command(weights, tmp_path, *arguments), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(says) and done.stderr.count("\n") == 1, done.stderr


def test_a_process_of_a_group_refuses_what_it_cannot_join():
    done = subprocess.run([sys.executable, "-m", "harness.mesh", "jax@x=2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --mesh x=2") and done.stderr.count("\n") == 1
