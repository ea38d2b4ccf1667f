"""The artifact of a run, assembled from what was judged, layer by layer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from harness import artifact, environment, judging, scaling
from harness.case import Case
from harness.gates import whole
from harness.judging import LAYER, Judged, Judging
from harness.runners import Setting, ours
from harness.workers import Ran


@dataclass(frozen=True)
class Layer:
    """What one layer's comparisons came to, without the arrays that they were made of."""

    case: Case  # less weights and inputs
    shape: tuple[int, ...]  # of the headline's hidden states
    settings: list[Setting]
    judged: list[Judged]
    bounds: dict[str, Any] | None  # the tolerance of the headline's figures
    blind: list[dict[str, str]]
    diagnoses: dict[str, str]  # what an implementation that failed did, in words


def headline(settings: Sequence[Setting]) -> Setting:
    """The setting of the figures that a run is known by."""
    return max(settings, key=lambda s: (s.input == "chapter", s.rope == "neutral", s.dtype != "float64"))


def conclude(judge: Judging, names: Sequence[str], named: Collection[str] = ()) -> Layer:
    """Wait for a layer's comparisons and keep what is needed of them; those `named` have their diagnosis."""
    judged, first, case = judge.finish(), headline(judge.settings), judge.case
    failed = {each.comparison.name for each in judged for finding in each.findings if not finding.match}
    said = {name: judge.diagnosis(name) for name in names if name in failed and name not in named}
    return Layer(
        case=replace(case, weights={}, inputs={}),
        shape=case.inputs[first.input]["hidden_states"].shape,
        settings=judge.settings,
        judged=judged,
        bounds=judging.bounds(judge.tolerances[first].result()) if first in judge.tolerances else None,
        blind=judge.blind.result(),
        diagnoses={name: words for name, words in said.items() if words},
    )


def padding_of(made: Mapping[str, Any]) -> tuple[int, int]:
    """How many of an input's queries are padding at the left, and of how many; 0 and 0 where none is."""
    padding = made.get("left_pad", [])
    return sum(padding), len(padding) * made["seq_len"] if padding else 0


def assemble(layers: Sequence[Layer], names: Sequence[str], ran: Ran, command: str, traces: str) -> dict[str, Any]:
    """The artifact of a run, from the judged comparisons of each layer; its `traces` will lie there, beside it."""
    case = layers[0].case
    runs = [(layer.case.layer, setting) for layer in layers for setting in layer.settings]
    settings = list(dict.fromkeys(setting for _, setting in runs))
    first_setting, bounds = headline(settings), layers[0].bounds
    dtypes = dict.fromkeys(setting.dtype for setting in settings)
    precision = [
        each
        for name in names
        if name in ran.matmul_bits
        for each in judging.precision(case.layer, name, ran.matmul_bits[name], dtypes)
    ]
    contract = [judging.contract(case.layer, name, written) for name, written in ran.written.items()]
    everything = [each for layer in layers for each in layer.judged] + precision + contract
    frameworks = {}
    for name in names:
        entry = judging.verdict(name, everything, first_setting, bounds, case.config.head_dim)
        entry["error"] = ran.errors.get(name)
        if first := entry["first_divergence"]:
            said = next(filter(None, (layer.diagnoses.get(name) for layer in layers)), None)
            first["explanation"] += f" Likely cause: {said}; that gives the same to rounding." if said else ""
        entry["match"] = entry["match"] and entry["error"] is None
        entry["seconds"] = ran.seconds.get(name)
        entry["exchanged"] = ran.exchanged.get(name)
        entry["not_checked"] = judging.not_checked(name, runs, everything, whole(case.config))
        if (printed := ran.printed.get(name)) and not ours(name):  # Gloo greets
            said = f"({printed[1]} lines: {printed[0][:80]!r} …)"
            entry["not_checked"].append(f"what it prints to standard output {said}")
        blank = [str(each.case.layer) for each in layers if "text" in case.made and "text" not in each.case.made]
        if blank:
            what = f"the text on layer {', '.join(blank)}"
            entry["not_checked"].append(f"{what}: what that sees depends on the layers below; it had the plain inputs")
        for count, queries in {padding_of(made) for layer in layers for made in layer.case.made.values()} - {(0, 0)}:
            what = "masked_scores, probs, heads and output of padding, which sees no token"
            entry["not_checked"].append(f"{what} ({count} of the {queries} queries): taken as 0")
        frameworks[name] = entry
    checks = [row._asdict() for each in everything for row in judging.rows(each)]
    checks.sort(
        key=lambda row: [row[key] for key in ("layer", "framework", "gate", "against", "dtype", "input", "rope")]
    )
    pairwise = judging.pairwise(everything, first_setting, names, bounds["max_abs"] if bounds else None)
    shown = [entry for entry in frameworks.values() if entry["max_abs_diff"] is not None]
    match = all(entry["match"] for entry in frameworks.values()) and all(row["match"] for row in checks)
    status = artifact.exit_status(frameworks)
    versions = environment.versions()
    B, T, _ = layers[0].shape
    return {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": case.source.get("model") or case.name,
        "layers": [layer.case.layer for layer in layers],
        "traces": traces,
        "batch_size": B,
        "seq_len": T,
        "setting": first_setting._asdict(),
        "match": match,
        "exit_status": status if match or status else 1,
        "max_abs_diff": max((entry["max_abs_diff"] for entry in shown), default=None),
        "mean_abs_diff": max((entry["mean_abs_diff"] for entry in shown), default=None),
        "frameworks": frameworks,
        "pairwise": pairwise,
        "blind_to": [{"layer": layer.case.layer, **bug} for layer in layers for bug in layer.blind],
        "scaling": scaling.measure() | {"parameters": scaling.parameters(case.config), "caching": scaling.caching()},
        "weights": {
            "source": case.source,
            "description": case.describe(),
            "sha256": case.sha256["weights"]
            if len(layers) == 1
            else {str(layer.case.layer): layer.case.sha256["weights"] for layer in layers},
        },
        "inputs": {
            name: {**made, "sha256": layer.case.sha256[name]}
            for layer in layers
            for name, made in layer.case.made.items()
        },
        "reference": {
            "class": "transformers.models.qwen3.modeling_qwen3.Qwen3Attention",
            "attn_implementation": "eager",
            "versions": {name: versions[name] for name in ("transformers", "torch")},
            "seconds": ran.seconds.get(LAYER),
        },
        "environment": environment.describe(next(filter(None, ran.accelerators.values()), None))
        | {
            "versions": versions,
            "matmul_bits": {name: bits[first_setting.dtype] for name, bits in ran.matmul_bits.items()},
        },
        "checks": checks,
    }
