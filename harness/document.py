"""The artifact of a run, assembled from what was judged."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from harness import artifact, environment, judging, scaling
from harness.case import Case
from harness.judging import LAYER, Judged, Judging
from harness.workers import Ran


def assemble(
    results: Sequence[tuple[Case, list[Judged], Judging]],
    names: Sequence[str],
    ran: Ran,
    command: str,
) -> dict[str, Any]:
    """The artifact of a run, from the judged comparisons of each case (one for each layer)."""
    case, _, judge = results[0]
    runs = [(case.layer, setting) for case, _, judge in results for setting in judge.settings]
    settings = list(dict.fromkeys(setting for _, setting in runs))
    headline = max(settings, key=lambda s: (s.input == "chapter", s.rope == "neutral", s.dtype != "float64"))
    noise = judge.tolerances[headline].result() if headline in judge.tolerances else None
    dtypes = dict.fromkeys(setting.dtype for setting in settings)
    precision = [
        each
        for name in names
        if name in ran.matmul_bits
        for each in judging.precision(results[0][0].layer, name, ran.matmul_bits[name], dtypes)
    ]
    contract = [judging.contract(case.layer, name, written) for name, written in ran.written.items()]
    everything = [each for _, judged, _ in results for each in judged] + precision + contract
    layers = [case.layer for case, _, _ in results]
    frameworks = {}
    for name in names:
        entry = judging.verdict(name, everything, headline, noise, case.config.head_dim)
        entry["error"] = ran.errors.get(name)
        if first := entry["first_divergence"]:
            said = next(filter(None, (judge.diagnosis(name) for _, _, judge in results)), None)
            first["explanation"] += f" It agrees with {said} to rounding." if said else ""
        entry["match"] = entry["match"] and entry["error"] is None
        entry["seconds"] = ran.seconds.get(name)
        entry["not_checked"] = judging.not_checked(name, runs, everything)
        if printed := ran.printed.get(name):
            entry["not_checked"].append(f"what it prints to standard output ({printed[1]} lines: {printed[0]!r} …)")
        if blank := [str(each.layer) for each, _, judge in results if "text" in case.made and "text" not in each.made]:
            what = f"the text on layer {', '.join(blank)}"
            entry["not_checked"].append(f"{what}: what that sees depends on the layers below; it had the plain inputs")
        frameworks[name] = entry
    checks = [row._asdict() for each in everything for row in judging.rows(each)]
    checks.sort(
        key=lambda row: [row[key] for key in ("layer", "framework", "gate", "against", "dtype", "input", "rope")]
    )
    bound = judging.bounds(noise, None)["max_abs"] if noise else None
    pairwise = judging.pairwise(everything, headline, names, bound)
    shown = [entry for entry in frameworks.values() if entry["max_abs_diff"] is not None]
    match = all(entry["match"] for entry in frameworks.values()) and all(row["match"] for row in checks)
    status = artifact.exit_status(frameworks)
    versions = environment.versions()
    B, T, _ = case.inputs[headline.input]["hidden_states"].shape
    return {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": case.source.get("model") or case.name,
        "layers": layers,
        "batch_size": B,
        "seq_len": T,
        "setting": headline._asdict(),
        "match": match,
        "exit_status": status if match or status else 1,
        "max_abs_diff": max((entry["max_abs_diff"] for entry in shown), default=None),
        "mean_abs_diff": max((entry["mean_abs_diff"] for entry in shown), default=None),
        "frameworks": frameworks,
        "pairwise": pairwise,
        "blind_to": [{"layer": case.layer, **bug} for case, _, judge in results for bug in judge.blind.result()],
        "scaling": scaling.measure() | {"parameters": scaling.parameters(case.config)},
        "weights": {
            "source": case.source,
            "description": case.describe(),
            "sha256": case.sha256["weights"]
            if len(results) == 1
            else {str(c.layer): c.sha256["weights"] for c, _, _ in results},
        },
        "inputs": {
            name: {**case.made[name], "sha256": case.sha256[name]} for case, _, _ in results for name in case.made
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
            "matmul_bits": {name: bits[headline.dtype] for name, bits in ran.matmul_bits.items()},
        },
        "checks": checks,
    }
