"""Planted bugs: what people really get wrong in an attention layer, each as an edit of an implementation's source.

    --impl numpy:norm_after_rope    `harness.compare` runs the NumPy page with that bug in it
    python -m harness.planted       every bug before every gate: who catches it, and which stage is named
    diagnose, blind_to              the bugs as hypotheses: which one explains a failure, which one a case cannot show

A gate that was never seen to fail proves nothing.
"""

import argparse
import contextlib
import functools
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits

from harness import artifact
from harness.bugs import BUGS, Bug, bf16, compiled, stands, variant
from harness.case import QWEN3_0_6B, BadInput, Case
from harness.export import Arguments, add_case_arguments, command, open_cases
from harness.gates import EQUATION, Array, Finding, Trace, compared, errors, local, probes, seen_by, structure, whole
from harness.gates import tolerance as tolerances_of
from harness.gates.tolerance import Tolerance
from harness.report.console import make_console
from harness.runners import Setting, environment, load
from impls import numpy_attention
from impls.spec import AttentionConfig, Observe


def devices(config: AttentionConfig) -> dict[str, int]:
    """The mesh on which bugs of a layer spread over devices are planted: two or more for heads, two for tokens."""
    K = config.num_key_value_heads
    return {"heads": next((n for n in range(2, K + 1) if K % n == 0), 1), "sequence": 2}


def run(
    module: ModuleType, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig
) -> dict[str, Array]:
    """A variant's whole trace."""
    with np.errstate(all="ignore"):  # what a bug divides by zero is the gates' concern
        if hasattr(module, "make_mesh"):
            mesh = module.make_mesh(module.jax.devices(), **devices(config))
            return module.run(weights, inputs, d_output, config, mesh)
        if hasattr(module, "run"):
            return module.run(weights, inputs, d_output, config)
        trace: dict[str, Array] = {}
        cache = module.forward(weights, inputs, config, _recording(trace))[1]
        module.backward(d_output, cache, _recording(trace))
        return trace


def _recording(trace: dict[str, Array], until: str = "") -> Observe:
    """An `observe` that keeps every value, and ends the run after one of them."""

    def record(name: str, value: Array) -> Array:
        trace[name] = value
        if name == until:
            raise _Enough
        return value

    return record


class _Enough(Exception):
    """Ends a run whose remaining entries are not wanted."""


# ---------------------------------------------------------------------------------- the bugs as hypotheses of a failure


class Scene:
    """One input and RoPE mode of a case in float64, with the page as it is and with each bug in it."""

    def __init__(self, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig, backward: bool = True):
        self.weights, self.inputs, self.d_output, self.config = weights, inputs, d_output, config
        self.projections: dict[tuple[int, int, int], tuple[Array, Array, Array | int, Array]] = {}
        self.page = self._run(variant("numpy"), backward)

    def hypothesis(self, bug: Bug, until: str = "") -> dict[str, Array]:
        """The page's trace with this bug, perhaps not further than one entry; of a forward bug the stages alone."""
        return self._run(variant("numpy", bug), not bug.forward, until)

    def effects(self, bugs: Iterable[Bug]) -> dict[Bug, float]:
        """The rms of what each bug in the forward pass does to the output.

        What reaches the output through the heads is multiplied by W_O for all bugs at once (3.12 is linear).
        """
        late, early = ([bug for bug in bugs if ("output" in bug.stages) is last] for last in (True, False))
        changes = {bug: self.hypothesis(bug)["output"] - self.page["output"] for bug in late}
        if early:
            heads = np.stack([self.hypothesis(bug, "heads")["heads"] - self.page["heads"] for bug in early])
            heads = heads.reshape(len(early), self.d_output.shape[0] * self.tokens, -1)
            changes |= zip(early, heads @ self.weights["o_proj.weight"].T, strict=True)
        return {bug: float(np.sqrt(np.mean(change**2))) for bug, change in changes.items()}

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.d_output.shape[1])

    @property
    def equal(self) -> bool:
        """Whether all tokens of a sequence are the same."""
        x = self.inputs["hidden_states"]
        return bool(np.all(x == x[:, :1]))

    @property
    def norms(self) -> tuple[Array, Array]:
        """The weights of the norms of Q and K."""
        return self.weights["q_norm.weight"], self.weights["k_norm.weight"]

    @property
    def eps_is_small(self) -> bool:
        """Whether eps is below a hundredth of every mean square that it is added to."""
        squares = (float(np.min(np.mean(self.page[name] ** 2, axis=-1))) for name in ("q_proj", "k_proj"))
        return min(squares) > 100 * self.config.rms_norm_eps

    @property
    def largest(self) -> float:
        """The largest score."""
        return float(np.max(np.abs(self.page["scores"])))

    @property
    def few_bits(self) -> bool:
        """Whether W_K holds bfloat16 numbers."""
        return np.array_equal(self.weights["k_proj.weight"], bf16(self.weights["k_proj.weight"]))

    def _run(self, module: ModuleType, backward: bool, until: str = "") -> dict[str, Array]:
        self._remember_projections(module)
        trace: dict[str, Array] = {}
        observe = _recording(trace, until)
        with np.errstate(all="ignore"), contextlib.suppress(_Enough):
            cache = module.forward(self.weights, self.inputs, self.config, observe)[1]
            if backward:
                module.backward(self.d_output, cache, observe)
        return trace

    def _remember_projections(self, module: ModuleType) -> None:
        """Project the same hidden states by the same weights once, for all variants that leave `project` as it is."""
        project = module.project
        if project.__code__ not in compiled("numpy").co_consts:
            return

        def remembered(x: Array, w: Array, heads: int, b: Array | int = 0) -> Array:
            if (id(x), id(w), id(b)) not in self.projections:
                self.projections[id(x), id(w), id(b)] = (x, w, b, project(x, w, heads, b))
            return self.projections[id(x), id(w), id(b)][-1]

        module.__dict__["project"] = remembered


def diagnose(
    case: Case, traces: Mapping[Setting, Trace], tolerances: Mapping[Setting, Tolerance] | None = None
) -> str | None:
    """What an implementation that failed did: the words of the bug that does the same, down to rounding, or None.

    Args: its traces by setting, of which those in float64 are used, else those for which gate T's `tolerances` are
    given; scenes in which it does not differ from the page say nothing and are left out. The output
    alone is enough. Several bugs that these inputs cannot tell apart are named with "or".
    """
    exact = {setting: trace for setting, trace in traces.items() if setting.dtype == "float64"}
    rounded = {setting: trace for setting, trace in traces.items() if setting in (tolerances or {})}
    fits: dict[Bug, tuple[int, float]] | None = None
    for setting, trace in (exact or rounded).items():
        backward = any(name.startswith("d_") for name in trace)
        scene = Scene(*case.arrays(setting.input, setting.rope, "float64"), case.config, backward)
        judge = _Judge(scene, None if exact else (tolerances or {})[setting])
        if judge.same(trace):
            continue
        found = {bug: judge.fit(bug, trace) for bug in (_imaginable(case.config) if fits is None else fits)}
        before = fits or {}
        fits = {bug: max(fit, before.get(bug, fit)) for bug, fit in found.items() if fit}
        if not fits:
            return None
    if not fits:
        return None
    entries, share = min(fits.values())
    limit = 4 * max(share, 0.03)  # a bug that is not the one would add to what rounding leaves
    best = sorted((fit, bug.says) for bug, fit in fits.items() if fit <= (entries, limit))
    return " or ".join(dict.fromkeys(says for _, says in best))


def _imaginable(config: AttentionConfig) -> list[Bug]:
    """The bugs that a layer can have and that can be tried on the page as it stands."""
    return [bug for bug in BUGS if "numpy" in bug.frameworks and bug.possible(config) and stands("numpy", bug)]


class _Judge:
    """Whether a trace is what a hypothesis predicts, by gate S's limit or by gate T's."""

    def __init__(self, scene: Scene, noise: Tolerance | None):
        self.scene, self.noise, self.seen = scene, noise, seen_by(scene.inputs)

    def same(self, trace: Trace) -> bool:
        """Whether rounding alone tells a trace from the page's."""
        return all(self.apart(name, trace[name], self.scene.page) <= 1 for name in self.scene.page if name in trace)

    def fit(self, bug: Bug, trace: Trace) -> tuple[int, float] | None:
        """How many entries the bug leaves unexplained, and the largest share of a limit; None where it does not fit.

        The output must be explained. A bug that changes nothing which this trace has explains nothing.
        """
        if len(trace) == 1 and not np.isfinite(trace["output"]).any():
            return None  # many things make all of it NaN
        if not bug.forward and not ("d_heads" in self.scene.page and self.same({"output": trace["output"]})):
            return None
        predicted = self.scene.hypothesis(bug)
        fit = self._fit(trace, predicted)
        if fit is None and self.noise and self._roughly(trace["output"], predicted["output"]):
            # Its own rounding may differ from a correct layer's: scores that were not scaled round eleven times worse.
            module = variant("numpy", bug)
            given = self.scene.weights, self.scene.inputs, self.scene.d_output, self.scene.config
            with np.errstate(all="ignore"):
                noise = tolerances_of.sample(module.forward, module.backward, *given, self.noise.rounding)
            fit = _Judge(self.scene, noise)._fit(trace, predicted)
        return fit

    def _fit(self, trace: Trace, predicted: Trace) -> tuple[int, float] | None:
        output = self.apart("output", trace["output"], predicted)
        if output > 1:
            return None
        shared = {name: predicted[name] for name in predicted if name in trace}
        if self.same({"output": predicted["output"]}) and (
            self.same(shared) or any(self.apart(name, trace[name], predicted) > 1 for name in shared)
        ):
            return None
        apart = [self.apart(name, trace[name], predicted) for name in shared]
        unexplained = sum(share > 1 for share in apart)
        return unexplained, output if unexplained else max(apart)

    def _roughly(self, output: Array, predicted: Array) -> bool:
        """Whether an output differs from the prediction by a hundredth of what the bug does."""
        if output.shape != predicted.shape:
            return False
        with np.errstate(all="ignore"):
            rest, effect = output - predicted, predicted - self.scene.page["output"]
            return bool(np.linalg.norm(rest) <= 0.01 * np.linalg.norm(effect))

    def apart(self, name: str, value: Array, other: Trace) -> float:
        """How far two values are apart, as a share of what rounding may do; where one is NaN, so must the other be."""
        value, expected = np.asarray(value), other[name]
        if value.shape != expected.shape:
            return math.inf
        finite = np.isfinite(compared(name, expected, self.seen))
        if not np.array_equal(np.isfinite(compared(name, value, self.seen)), finite):
            return math.inf
        if not finite.all():
            value, expected = np.where(finite, value, 0), np.where(finite, expected, 0)
        if self.noise is None:
            scale = structure.per_token(name, expected, self.seen)
            if name.startswith("d_") and name in self.floors:
                scale = np.maximum(scale, self.floors[name])
            return errors(name, value, expected, scale, self.seen)[1] / structure.LIMIT
        rms, ratio, _ = errors(name, value, expected, self.noise.spread(name).sigma, self.seen)
        rms_limit, max_limit = self.noise.limits(name, rounded=False)
        return max(rms / (rms_limit + float(np.finfo(np.float32).tiny)), ratio / max_limit)

    @functools.cached_property
    def floors(self) -> dict[str, Array]:
        """What gate S takes for the scale where a correct gradient is exactly 0."""
        scene = self.scene
        scales = structure.score_gradient_scales(scene.page, scene.weights, scene.inputs, scene.config)
        return {name: structure.per_token(name, scale) for name, scale in scales.items()}


# ---------------------------------------------------------------------------------------------- what a case is blind to


def blind_to(case: Case, tolerances: Mapping[Setting, Tolerance]) -> list[dict[str, str]]:
    """The bugs in the forward pass that the output cannot show in any scene of the case: name, says, reason.

    Args: gate T's tolerance of each scene. A bug is seen where the rms of what it does to the output, in the
    first positions, is larger than what rounding may do there. The scene that shows most comes first; what it shows is
    not tried again.
    """
    unseen = {bug: 0.0 for bug in _imaginable(case.config) if bug.forward and bug.kind not in ("dtype", "runner")}
    weights = {name: np.asarray(value, np.float64) for name, value in case.weights.items()}
    scenes: list[Scene] = []
    for setting in sorted(tolerances, key=lambda s: (s.rope != "model", s.input != "chapter")):
        _, inputs, d_output = replace(case, weights={}).arrays(setting.input, setting.rope, "float64")
        first = {name: value[:, :POSITIONS] for name, value in inputs.items() if name != "attention_mask"}
        if "attention_mask" in inputs:
            first["attention_mask"] = inputs["attention_mask"][:, :, :POSITIONS, :POSITIONS]
        scene = Scene(weights, first, d_output[:, :POSITIONS], case.config, backward=False)
        spread = tolerances[setting].spread("output")
        limit = spread.kappa * float(np.sqrt(np.mean(spread.sigma[:, :POSITIONS] ** 2)))
        for bug, effect in scene.effects(unseen).items():
            if effect <= limit:  # NaN is seen
                unseen[bug] = max(unseen[bug], effect / limit)
            else:
                del unseen[bug]
        scenes.append(scene)
        if not unseen:
            break
    return [
        {"name": bug.name, "says": bug.says, "reason": _reason(bug, share, scenes)} for bug, share in unseen.items()
    ]


POSITIONS = 32
"""How many of a sequence's positions `blind_to` looks at: a bug that they show, the case shows."""


def _reason(bug: Bug, share: float, scenes: Sequence[Scene]) -> str:
    """The first property of all the scenes that hides this bug, and how little it does."""
    moves = f"it moves the output by {share:.1g} of what rounding may" if share else "it does not move the output"
    for words, blinds, holds in PROPERTIES:
        if {bug.kind, bug.name} & set(blinds.split()) and all(holds(scene) for scene in scenes):
            return f"{words} ({moves})"
    return moves


PROPERTIES: tuple[tuple[str, str, Callable[[Scene], bool]], ...] = (
    (
        "a sequence has one token",
        "projections heads norm rope scale mask softmax positions precision",
        lambda s: s.tokens == 1,
    ),
    ("all tokens of a sequence are equal", "heads norm rope scale mask softmax positions precision", lambda s: s.equal),
    ("the mask is among the inputs, and added", "mask", lambda s: "attention_mask" in s.inputs),
    ("there is one query head", "heads", lambda s: s.config.num_attention_heads == 1),
    ("there is one key/value head", "heads", lambda s: s.config.num_key_value_heads == 1),
    ("each query head has its own key/value head", "heads", lambda s: s.config.num_key_value_groups == 1),
    ("the norms' weights are one", "norm", lambda s: all(bool(np.all(w == 1)) for w in s.norms)),
    ("the two norms have equal weights", "norm", lambda s: np.array_equal(*s.norms)),
    ("RoPE is neutral", "rope rope_tables_bfloat16 norm_after_rope norms_swapped", lambda s: not s.inputs["sin"].any()),
    ("no token is small beside eps", "eps_1e-5 eps_1e-8 eps_left_out eps_outside_root", lambda s: s.eps_is_small),
    ("no score is larger than 30", "mask_minus_30 softmax_without_max scores_soft_capped", lambda s: s.largest <= 30),
    ("1/√d_k has three digits", "scale_three_digits", lambda s: s.config.head_dim in (4, 16, 64, 256)),
    ("bfloat16 numbers fit in float16", "k_weights_float16", lambda s: s.few_bits),
)
"""What makes a case blind: in words, to which kinds of bugs or bugs by name, and whether a scene has it."""


# ------------------------------------------------------------------------------------------------------- bugs × gates

GATES = ("S", "L", "T", "P")
"""Structure, local certificate, tolerance, probes."""
NAIVE = 1e-4
"""What people ask of max |difference| of the output: here against the layer in float32, chapter input, model RoPE."""


class Court(NamedTuple):
    """One input and RoPE mode, and what the gates judge by there."""

    setting: Setting
    exact: tuple[Trace, Trace, Array]  # weights, inputs and d_output in float64
    given: tuple[Trace, Trace, Array]  # and in float32
    factors: Mapping[str, local.Factor]  # the weights as gate L wants them
    truth: Trace
    layer: Array  # the layer's own output in float32
    noise: Tolerance


def courts(case: Case) -> list[Court]:
    """Every input with model and with neutral RoPE, what shows most first; truth and noise know of no variant."""
    layer = load("hf-eager").run
    factors = {name: local.factor(value.astype(np.float64)) for name, value in case.weights.items()}

    def court(setting: Setting) -> Court:
        exact, given = (case.arrays(setting.input, setting.rope, dtype) for dtype in ("float64", "float32"))
        noise = tolerances_of.sample(numpy_attention.forward, numpy_attention.backward, *exact, case.config)
        truth, output = layer(*exact, case.config), layer(*given, case.config)["output"]
        return Court(setting, exact, given, factors, truth, output, noise)

    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(court, [Setting(i, rope, "float32") for rope in ("model", "neutral") for i in case.inputs])
        )


def examine(
    framework: str, bug: Bug, scenes: Sequence[Court], exact: Sequence[probes.Probe], config: AttentionConfig
) -> dict[str, Any]:
    """One bug before every gate, each in the first scene in which it catches it: a row of the matrix."""
    failed: dict[str, list[Finding]] = {gate: [] for gate in GATES}
    module, naive = variant(framework, bug), math.nan
    for scene in scenes:
        if not failed["S"]:
            trace = run(module, *scene.exact, config)
            failed["S"] = _failing(structure.judge, trace, scene.truth, *scene.exact[:2], config, whole(config))
        if not (failed["L"] and failed["T"]):
            trace = run(module, *scene.given, config)
            if scene is scenes[0]:
                naive = float(np.max(np.abs(trace["output"] - scene.layer)))
            failed["L"] = failed["L"] or _failing(local.judge, trace, scene.factors, *scene.exact[1:], config)
            rule = scene.noise, whole(config), False, False, "float32"
            failed["T"] = failed["T"] or _failing(tolerances_of.judge, trace, scene.truth, *rule)
    for probe in exact:
        if not failed["P"]:
            trace = run(module, probe.weights, probe.inputs, probe.d_output, config)
            failed["P"] = _failing(probes.judge, trace, probe, whole(config))
    stage = first(failed)
    return {
        "framework": framework,
        "name": bug.name,
        "kind": bug.kind,
        "says": bug.says,
        "declared": list(bug.stages),
        "stage": stage,
        "localised": stage in bug.stages,
        "caught": any(failed.values()),
        "gates": {gate: bool(findings) for gate, findings in failed.items()},
        "naive": {"max_abs": naive if math.isfinite(naive) else None, "caught": not naive < NAIVE},
    }


def first(failed: Mapping[str, Sequence[Finding]]) -> str | None:
    """The stage to name: the earliest that gate S found, else L, else T, else P."""
    order = {name: index for index, name in enumerate(EQUATION)}
    for findings in (failed[gate] for gate in GATES if failed[gate]):
        return min((finding.stage for finding in findings), key=lambda stage: order.get(stage, len(order)))
    return None


def _failing(judge: Callable[..., list[Finding]], *arguments: Any) -> list[Finding]:
    with np.errstate(all="ignore"):  # NaN is judged, not warned of
        return [finding for finding in judge(*arguments) if not finding.match]


def matrix(case: Case, bugs: Sequence[tuple[str, Bug]]) -> dict[str, Any]:
    """Every bug before every gate on one case: the rows, what the case is blind to, and the totals."""
    for framework in sorted({framework for framework, _ in bugs}):
        variant(framework)  # imports it, here and not in a thread
    scenes = courts(case)
    B, T = scenes[0].layer.shape[:2]
    exact = [probes.build(name, case.config, T, B) for name in probes.NAMES]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda each: examine(each[0], each[1], scenes, exact, case.config), bugs))
    return {
        "bugs": rows,
        "blind_to": blind_to(case, {scene.setting: scene.noise for scene in scenes}),
        "totals": {
            "planted": len(rows),
            "caught": sum(row["caught"] for row in rows),
            "localised": sum(row["localised"] for row in rows),
            "naive_1e-4_caught": sum(row["naive"]["caught"] for row in rows),
        },
    }


# ------------------------------------------------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 every bug is caught, 1 one is not, 2 unusable input."""
    try:
        options = make_parser().parse_args(argv)
        words = ["python", "-m", "harness.planted", *(sys.argv[1:] if argv is None else argv)]
        document = plant_all(options, shlex.join(words))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the last result is as it was", file=sys.stderr)
        return 130
    show(document, make_console())
    return 0 if document["totals"]["caught"] == document["totals"]["planted"] else 1


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Arguments(
        prog="python -m harness.planted",
        description="Plant bugs in the implementations, one after the other, and see which gate catches each: S "
        "structure, L local certificate, T tolerance, P probes; and whether max |difference| < 1e-4 alone would.",
        epilog="exit status: 0 every bug is caught, 1 one is not, 2 unusable input or arguments",
    )
    add_case_arguments(parser)
    choice = parser.add_argument_group("run")
    choice.add_argument("--bug", nargs="+", metavar="NAME", help="only these: eps_1e-5, or jax:eps_1e-5 (default: all)")
    choice.add_argument(
        "--out",
        type=Path,
        default=Path("artifacts"),
        metavar="DIR",
        help="receives planted_bugs.json (default: artifacts/)",
    )
    return parser


def plant_all(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Run the matrix, write `planted_bugs.json` and return it. Raises BadInput."""
    started = time.perf_counter()
    choose(options.bug)  # refuses before anything is made
    case, *more = open_cases(options, Path("weights"))
    if more:
        raise BadInput("--layer: one layer at a time")
    bugs = choose(options.bug, case.config)
    os.environ.update(environment(Path(__file__).resolve().parent.parent, "cpu"))  # before JAX is imported
    os.environ["JAX_NUM_CPU_DEVICES"] = str(math.prod(devices(case.config).values()))
    with threadpool_limits(1):
        found = matrix(case, bugs)
    document = {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "weights": {"source": case.source, "description": case.describe(), "sha256": case.sha256["weights"]},
        "inputs": {name: {**case.made[name], "sha256": case.sha256[name]} for name in case.inputs},
        "naive": f"max |output − layer's| < {NAIVE:.0e} in float32, chapter input, model RoPE",
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }
    try:
        artifact.write(document, options.out / "planted_bugs.json")
    except OSError as error:
        raise BadInput(
            f"--out {options.out}: cannot be written to ({error.strerror}); choose another folder"
        ) from error
    return document


def choose(asked: Sequence[str] | None, config: AttentionConfig = QWEN3_0_6B) -> list[tuple[str, Bug]]:
    """The bugs asked for, by default all that a layer can have, each in every framework that it can be planted in.

    Not those of PyTorch on several devices, which takes a process for each. Raises BadInput for one there is not.
    """
    planted = {(framework, bug.name): bug for bug in BUGS for framework in bug.frameworks if framework != "torch-mesh"}
    known = {name for framework, bug in planted for name in (bug, f"{framework}:{bug}")}
    for name in asked or []:
        if name not in known:
            raise BadInput(f"--bug {name}: no such bug; python -m harness.compare --list names them")
    return [
        (framework, bug)
        for (framework, name), bug in planted.items()
        if (bug.possible(config) if asked is None else name in asked or f"{framework}:{name}" in asked)
    ]


def show(document: Mapping[str, Any], console: Console) -> None:
    """The matrix as a table, grouped by kind, what no gate saw, and the totals."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption = f"S structure, L local certificate, T tolerance, P probes. 1e-4: {document['naive']}."
    table.caption_justify, table.caption_style = "left", "dim"
    table.add_column("planted bug", overflow="fold")
    for heading in (*GATES, "1e-4"):
        table.add_column(heading, justify="center", no_wrap=True)
    table.add_column("first at", overflow="fold")
    rows, reasons = document["bugs"], {each["name"]: each["reason"] for each in document["blind_to"]}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        table.add_row(Text(kind, "bold"))
        for row in (row for row in rows if row["kind"] == kind):
            caught = [*row["gates"].values(), row["naive"]["caught"]]
            marks = [Text("✓", "green") if each else Text("·", "dim") for each in caught]
            stage = Text(row["stage"] or "not caught", "" if row["localised"] else "bold red")
            if row["caught"] and not row["localised"]:
                stage.append(f", not {' or '.join(row['declared'])}")
            table.add_row(f"  {row['framework']}:{row['name']}", *marks, stage)
        table.add_section()
    console.print(table)
    for row in (row for row in rows if not row["caught"]):
        reason = reasons.get(row["name"], "nothing in this case shows it")
        console.print(f"Not caught  {row['framework']}:{row['name']}: {reason}")
    total = document["totals"]
    console.print(
        f"{total['planted']} planted, {total['caught']} caught, {total['localised']} localised to the declared stage; "
        f"max |difference| < 1e-4 alone catches {total['naive_1e-4_caught']}. {document['seconds']:.0f} s."
    )


if __name__ == "__main__":
    command(main)
