"""The planted bugs: that the gates catch them, that a failure is named by them, and what a case cannot see of them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import bugs, planted
from harness.bugs import BUGS, Bug
from harness.case import Case, seeded_case
from harness.gates import EQUATION, NAMES, tolerance
from harness.gates.tolerance import Tolerance
from harness.runners import Setting
from impls import numpy_attention
from impls.spec import AttentionConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = AttentionConfig(hidden_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=24, rms_norm_eps=1e-6)
B, T = 2, 7
FORWARD = [bug for bug in BUGS if "numpy" in bug.frameworks and bug.forward and bug.kind not in ("dtype", "runner")]
FORWARD = [bug for bug in FORWARD if bug.possible(CONFIG)]


def make(folder: Path, config: AttentionConfig = CONFIG, seq_len: int = T) -> Case:
    return seeded_case(folder, batch=B, seq_len=seq_len, config=config)


def noise(case: Case, ropes: tuple[str, ...] = ("neutral", "model")) -> dict[Setting, Tolerance]:
    """Gate T's tolerance of every input with these RoPE modes."""
    page = numpy_attention.forward, numpy_attention.backward
    return {
        Setting(name, rope, "float32"): tolerance.sample(*page, *case.arrays(name, rope, "float64"), case.config)
        for name in case.inputs
        for rope in ropes
    }


def outputs(case: Case, framework: str, bug: Bug | None, dtype: str, *entries: str) -> dict[Setting, Any]:
    """What a candidate returns in each input under model RoPE: the output, and perhaps more entries."""
    module = bugs.variant(framework, bug)
    traces = {}
    for name in case.inputs:
        trace = planted.run(module, *case.arrays(name, "model", dtype), case.config)
        traces[Setting(name, "model", dtype)] = {entry: trace[entry] for entry in ("output", *entries)}
    return traces


def named(bug: Bug, said: str | None) -> bool:
    """Whether a diagnosis names the bug, perhaps with others which these inputs cannot tell from it, but not many."""
    bugs = (said or "").split(" or ")
    return bug.says in bugs and len(bugs) <= 3


def names(found: list[dict[str, str]]) -> set[str]:
    return {each["name"] for each in found}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Geometry with N, K, G, B, T pairwise distinct and a d_k whose root has many digits."""
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tolerances(tiny: Case) -> dict[Setting, Tolerance]:
    return noise(tiny)


# ------------------------------------------------------------------------------------------------------------ the list


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.frameworks[0]}:{bug.name}")
def test_edit_has_one_place_and_compiles(bug: Bug) -> None:
    for framework in bug.frameworks:
        source = bugs.path(framework).read_text(encoding="utf-8")
        assert source.count(bug.old) == 1 and bug.new != bug.old
        compile(source.replace(bug.old, bug.new), framework, "exec")
    assert set(bug.stages) <= set(EQUATION)
    assert bug.says and bug.says[-1] != "." and "\n" not in bug.says


def test_there_are_enough_of_every_kind() -> None:
    assert len(bugs.names("numpy")) >= 70
    for framework in ("jax", "torch"):
        assert len(bugs.names(framework)) >= 8
        assert set(bugs.names(framework)) <= {bug.name for bug in BUGS}
    for framework in (*bugs.ALL, "jax-mesh", "torch-mesh"):
        assert len(bugs.names(framework)) == len(set(bugs.names(framework)))
    says = [bug.says for bug in BUGS if "numpy" in bug.frameworks]
    assert len(says) == len(set(says))
    assert len({bug.kind for bug in BUGS}) >= 12
    assert sum(bug.kind == "devices" for bug in BUGS) >= 7


def test_edit_that_no_longer_fits_the_source_is_an_error() -> None:
    bug = BUGS[0]._replace(old="this line is gone")
    with pytest.raises(RuntimeError, match="stands 0 times"):
        bugs.variant("numpy", bug)


# ------------------------------------------------------------------------------------------------------ bugs and gates


def test_matrix(tiny: Case) -> None:
    """Every bug is caught, nearly always at its declared stage; every gate earns its place; the naive check does not.

    One test, since the matrix takes longest.
    """
    found = planted.matrix(tiny, planted.choose(None))
    rows, totals = found["bugs"], found["totals"]
    assert [row["name"] for row in rows if not row["caught"]] == []
    assert totals["caught"] == totals["planted"] == len(rows) == len(planted.choose(None))
    wrong = [(row["name"], row["stage"], row["declared"]) for row in rows if not row["localised"]]
    assert totals["localised"] == len(rows) - len(wrong) >= 0.95 * len(rows), wrong

    caught = {gate: {row["name"] for row in rows if row["gates"][gate]} for gate in planted.GATES}
    assert "norm_float32" in caught["S"] - caught["L"] - caught["T"] - caught["P"]
    assert "softmax_without_max" in caught["P"] - caught["S"] - caught["L"] - caught["T"]
    assert "float64_scale" in caught["T"] - caught["S"] - caught["L"]
    assert len(caught["L"]) > 0.9 * len({row["name"] for row in rows})  # it needs no reference

    missed = [row["name"] for row in rows if not row["naive"]["caught"]]
    print("max |difference| < 1e-4 passes", *missed)
    assert {"eps_1e-5", "mask_minus_30", "one_head_slightly_off"} <= set(missed)
    assert {row["name"] for row in rows if row["kind"] == "backward"} <= set(missed)
    assert totals["naive_1e-4_caught"] == len(rows) - len(missed) > 0.5 * len(rows)


def test_a_bug_in_the_page_does_not_reach_the_oracle(tiny: Case) -> None:
    """Truth and noise before and after a variant of the page was made and run are the same to the last bit."""
    before = planted.courts(tiny)
    for name in ("norms_skipped", "inputs_stale", "jacobian_without_rank_one_term"):
        bug = bugs.find("numpy", name)
        row = planted.examine("numpy", bug, before, [], tiny.config)
        assert row["caught"] and row["localised"]
    assert "last_repeated" not in vars(numpy_attention)
    for old, new in zip(before, planted.courts(tiny), strict=True):
        assert all(np.array_equal(old.truth[name], new.truth[name]) for name in NAMES)
        assert all(np.array_equal(old.noise.spreads[n].sigma, new.noise.spreads[n].sigma) for n in NAMES)


def test_what_is_correct_is_not_caught(tiny: Case) -> None:
    courts = planted.courts(tiny)
    probes = [planted.probes.build(name, CONFIG, T, B) for name in planted.probes.NAMES]
    for framework in bugs.ALL:
        nothing = Bug("nothing", "none", "nothing", "output", "3.12: MHA(X)", "3.12: MHA(X) ", (framework,))
        row = planted.examine(framework, nothing, courts, probes, tiny.config)
        assert not any(row["gates"].values()), row
        assert row["stage"] is None and not row["localised"] and not row["naive"]["caught"]


def test_planting_in_place_makes_jax_compile_anew() -> None:
    """Also where it had compiled and run the layer without the bug."""
    code = """
import numpy as np
from harness import bugs, planted
from impls import jax_attention
from impls.spec import AttentionConfig, weight_shapes
config = AttentionConfig(8, 2, 1, 4, 1e-6)
random = np.random.default_rng(0)
weights = {name: random.standard_normal(shape) for name, shape in weight_shapes(config).items()}
x, d = random.standard_normal((2, 1, 3, 8))
cos, sin = np.full((1, 3, 4), 0.6), np.full((1, 3, 4), 0.8)
def output():
    return jax_attention.run(weights, {"hidden_states": x, "cos": cos, "sin": sin}, d, config)["output"]
before = output()
bugs.plant("jax", "kv_heads_tiled")
assert np.array_equal(before, output())  # one key/value head: nothing to tile
bugs.plant("jax", "norm_one_plus_weight")
assert not np.allclose(before, output())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------- naming the cause


def test_every_forward_bug_is_named_from_the_output_alone(tiny: Case) -> None:
    unnamed = {}
    for bug in FORWARD:
        said = planted.diagnose(tiny, outputs(tiny, "numpy", bug, "float64"))
        if not named(bug, said):
            unnamed[bug.name] = said
    nothing = {"softmax_without_max", "k_weights_float16"}  # in float64 these change nothing
    assert unnamed.keys() <= {*nothing, "mask_zero_times_infinity"}, unnamed  # and many things make all of it NaN


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("jax", "kv_heads_tiled"),
        ("jax", "rope_negative_sine"),
        ("jax", "eps_1e-5"),
        ("torch", "heads_split_without_swap"),
        ("torch", "scale_left_out"),
        ("torch", "softmax_plus_1e-6"),
        ("torch", "last_position_repeated"),
        ("torch", "probs_bfloat16"),
    ],
)
def test_other_frameworks_are_diagnosed_too(tiny: Case, framework: str, name: str) -> None:
    bug = bugs.find(framework, name)
    assert named(bug, planted.diagnose(tiny, outputs(tiny, framework, bug, "float64")))


@pytest.mark.parametrize("name", ["norm_after_rope", "scale_left_out", "mask_off_by_one", "v_heads_tiled", "eps_1e-5"])
def test_float32_alone_is_enough(tiny: Case, tolerances: dict[Setting, Tolerance], name: str) -> None:
    """Within gate T's limits; where the bug makes rounding itself worse (no scale), within its own."""
    bug = bugs.find("numpy", name)
    assert planted.diagnose(tiny, outputs(tiny, "numpy", bug, "float32"), tolerances) == bug.says


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("numpy", "rope_backward_not_transposed"),
        ("numpy", "group_gradient_averaged"),
        ("torch", "jacobian_without_rank_one_term"),
        ("torch", "k_detached"),
    ],
)
def test_backward_bug_is_named_from_its_gradients(tiny: Case, framework: str, name: str) -> None:
    bug = bugs.find(framework, name)
    assert planted.diagnose(tiny, outputs(tiny, framework, bug, "float64", *NAMES)) == bug.says
    assert named(bug, planted.diagnose(tiny, outputs(tiny, framework, bug, "float64", "d_hidden_states")))
    assert planted.diagnose(tiny, outputs(tiny, framework, bug, "float64")) is None


def test_stages_tell_apart_what_the_output_cannot(tiny: Case) -> None:
    """Under neutral RoPE the norms' weights only ever occur as a product."""
    bug = bugs.find("numpy", "norms_swapped")
    setting = Setting("chapter", "neutral", "float64")
    trace = planted.run(bugs.variant("numpy", bug), *tiny.arrays(*setting), CONFIG)
    assert planted.diagnose(tiny, {setting: {"output": trace["output"]}}) is None
    assert planted.diagnose(tiny, {setting: trace}) == bug.says


def test_bugs_that_the_inputs_cannot_tell_apart_are_all_named(tmp_path: Path) -> None:
    """With one key/value head for two query heads, reversing the heads is exchanging them."""
    case = make(tmp_path, AttentionConfig(40, 2, 1, 24, 1e-6))
    both = [bugs.find("numpy", name) for name in ("two_heads_exchanged", "heads_reversed")]
    said = planted.diagnose(case, outputs(case, "numpy", both[0], "float64"))
    assert said and set(said.split(" or ")) == {bug.says for bug in both}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_guess(tiny: Case, tolerances: dict[Setting, Tolerance], dtype: str) -> None:
    """Nothing is said of a correct implementation, nor of an error that no planted bug makes."""
    traces = outputs(tiny, "torch", None, dtype, *NAMES)
    assert planted.diagnose(tiny, traces, tolerances) is None
    random = np.random.default_rng(0)
    for size in (1e-6, 1e-3, 1.0):
        wrong = {
            setting: {"output": trace["output"] * (1 + size * random.standard_normal(trace["output"].shape))}
            for setting, trace in traces.items()
        }
        assert planted.diagnose(tiny, wrong, tolerances) is None
    bug = bugs.find("numpy", "layer_norm")  # nearly it, and correlated with it, is not it
    near = outputs(tiny, "numpy", bug, dtype)
    for setting, trace in near.items():
        trace["output"] = traces[setting]["output"] + 0.99 * (trace["output"] - traces[setting]["output"])
    assert planted.diagnose(tiny, near, tolerances) is None


def test_a_bug_must_explain_every_scene(tiny: Case) -> None:
    first, second = (bugs.find("numpy", name) for name in ("layer_norm", "scale_d"))
    traces = outputs(tiny, "numpy", first, "float64")
    other = outputs(tiny, "numpy", second, "float64")
    assert planted.diagnose(tiny, traces) == first.says
    assert planted.diagnose(tiny, dict([*list(traces.items())[:1], *list(other.items())[1:]])) is None


# ---------------------------------------------------------------------------------------------- what a case cannot see


def test_a_lively_case_sees_nearly_everything(tiny: Case, tolerances: dict[Setting, Tolerance]) -> None:
    found = planted.blind_to(tiny, tolerances)
    assert names(found) <= {"softmax_without_max", "k_weights_float16", "mask_minus_30", "softmax_plus_1e-6"}
    reasons = {each["name"]: each["reason"] for each in found}
    assert "no score is larger than 30" in reasons["softmax_without_max"]
    assert all(set(each) == {"name", "says", "reason"} and each["reason"] for each in found)


@pytest.mark.parametrize("blind", ["unit norms", "one token", "equal tokens", "multi-head", "one head", "neutral"])
def test_blind_case(tmp_path: Path, blind: str) -> None:
    heads = {"multi-head": (3, 3), "one head": (1, 1)}.get(blind, (6, 3))
    case = make(tmp_path, replace(CONFIG, num_attention_heads=heads[0], num_key_value_heads=heads[1]))
    ropes: tuple[str, ...] = ("neutral", "model")
    if blind == "unit norms":
        case = replace(case, weights={n: np.ones_like(w) if "norm" in n else w for n, w in case.weights.items()})
        hidden, reason = {"norms_swapped", "norm_weights_ignored", "norm_after_rope"}, "norms' weights are one"
    elif blind == "one token":
        case = replace(case, inputs={n: {k: v[:, :1] for k, v in i.items()} for n, i in case.inputs.items()})
        hidden, reason = {"scale_left_out", "mask_left_out", "rope_left_out", "norms_swapped"}, "one token"
    elif blind == "equal tokens":
        for arrays in case.inputs.values():
            arrays["hidden_states"] = np.repeat(arrays["hidden_states"][:, :1], T, axis=1)
        hidden, reason = {"scale_left_out", "mask_left_out", "rope_left_out", "output_shifted"}, "tokens of a sequence"
    elif blind == "multi-head":
        hidden, reason = {"kv_heads_tiled", "k_heads_tiled", "v_heads_tiled"}, "its own key/value head"
    elif blind == "one head":
        hidden, reason = {"kv_heads_tiled", "two_heads_exchanged", "heads_reversed"}, "one query head"
    else:
        ropes = ("neutral",)
        hidden, reason = {"rope_left_out", "rope_negative_sine", "norms_swapped", "norm_after_rope"}, "RoPE is neutral"
    found = planted.blind_to(case, noise(case, ropes))
    assert hidden <= names(found)
    assert all(reason in each["reason"] for each in found if each["name"] in hidden)
    assert not {"v_projected_with_k", "output_bfloat16", "bias_on_output"} & names(found)


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(tiny: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """python -m harness.planted on the tiny case, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planted, "environment", lambda *_: {})  # JAX is there already, and nothing outlives the test
    return lambda *arguments: planted.main(["--weights", str(tiny.paths["weights"]), *arguments])


def test_command(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--batch", "2", "--seq-len", "7", "--bug", "numpy:eps_1e-5", "norm_after_rope") == 0
    document = json.loads((tmp_path / "artifacts" / "planted_bugs.json").read_text())
    totals = {"planted": 2, "caught": 2, "localised": 2, "naive_1e-4_caught": 1}
    assert document["totals"] == totals
    assert [row["name"] for row in document["bugs"]] == ["norm_after_rope", "eps_1e-5"]
    assert "model RoPE" in document["naive"] and document["weights"]["sha256"]
    out = capsys.readouterr().out
    assert "numpy:norm_after_rope" in out and "q_norm" in out and "2 planted, 2 caught, 2 localised" in out


def test_command_says_what_is_not_caught_and_why(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--seq-len", "1", "--bug", "numpy:mask_left_out") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Not caught numpy:mask_left_out: a sequence has one token" in out


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--bug", "eps"], "--bug eps: no such bug"), (["--batch", "0"], "--batch")]
)
def test_bad_input_is_one_line(command: Any, capsys: pytest.CaptureFixture[str], arguments, words) -> None:
    assert command(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1
