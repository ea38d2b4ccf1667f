"""A case for a program in any language, and what it wrote back.

`write` puts into one folder all that a port needs: weights, inputs, cotangents and probes as safetensors, and
`case.json`, which lists the runs and the names and shapes of all stages. The program answers each run that it can with
a safetensors file of the run's name, in a folder of its own, that holds the output and whatever stages and gradients it
has. `answers` and `land` put those before the judges.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.case import BadInput, Case, open_tensors, staged, write_tensors
from harness.gates import EQUATION, direction, letters, whole
from harness.judging import Judging
from harness.runners import PROBES, Setting, given, probe_cases, probe_file
from impls.spec import BIASES, WEIGHTS, weight_shapes

Answers = Mapping[str, Sequence[Path]]

HOW = (
    "For each run: read its weights [out, in] and its inputs, compute the layer, and write <run>.safetensors into a "
    "folder of your own with the tensor 'output' [B,T,D], with any stages and gradients (d_ and the name) you have, "
    "by these names and shapes and in the run's dtype. d_output is the gradient at the output. masked_scores is "
    "compared at the keys that a query may see. Where a run's inputs have an attention_mask [B,1,T,S], add it to the "
    "scores: the triangle and the padding are in it, and rows of padding are not compared. Arrays are row-major and "
    "contiguous. Then: python -m harness.compare --trace FOLDER, with the flags that chose the case."
)


EQUATIONS = {
    "q_proj": "X W^T, plus q_proj.bias if there is one, cut into N heads of H; k_proj and v_proj alike into K heads",
    "q_norm": "w * x / sqrt(mean(x^2) + rms_norm_eps), over each head by itself; k_norm alike",
    "q_rope": "x * cos + rot(x) * sin with rot([x1, x2]) = [-x2, x1] of the two halves of a head; k_rope alike",
    "scores": "q . k / sqrt(H); query head n reads key/value head n // G",
    "masked_scores": "scores where key <= query, else -infinity (or any number that no score comes near); "
    "scores + attention_mask where the inputs have one",
    "probs": "softmax of a row",
    "heads": "probs V",
    "output": "heads, concatenated, times W_O^T, plus o_proj.bias if there is one",
}


def write(case: Case, dtypes: Sequence[str], folder: Path) -> list[Path]:
    """Write a case's runs in these dtypes to `folder`, with the probes where one is float32; returns the files.

    All of them or, where it cannot write, none: it then raises BadInput.
    """
    with staged(folder) as stage:
        files = write_files(case, dtypes, stage)
    return [folder / path.name for path in files]


def write_files(case: Case, dtypes: Sequence[str], folder: Path) -> list[Path]:
    """The same, one file after the other."""
    files: list[Path] = []

    def put(name: str, tensors: Mapping[str, Any]) -> str:
        files.append(folder / f"{name}.safetensors")
        write_tensors(files[-1], tensors, {})
        return files[-1].name

    runs = []
    for dtype in dtypes:
        rounded = case.rounded(dtype)
        named = ""
        for setting in (Setting(name, rope, dtype) for name in case.inputs for rope in ("neutral", "model")):
            weights, inputs, d_output = rounded.arrays(*setting)
            named = named or put(f"weights.{dtype}", weights)
            own = put(setting.label, {**inputs, "d_output": d_output})
            runs.append({"run": setting.label, "weights": named, "inputs": own})
    if "float32" in dtypes:
        answers, _ = probe_cases(case.config, folder)
        for setting in [each for each in PROBES if each.input in answers]:
            weights, inputs, d_output = given(case, setting, folder)
            own = put(setting.label, {**inputs, "d_output": d_output})
            runs.append({"run": setting.label, "weights": put(f"weights.{setting.label}", weights), "inputs": own})
            probe_file(folder, setting.input).unlink()

    B, T, _ = next(iter(case.inputs.values()))["hidden_states"].shape
    padded = any("attention_mask" in arrays for arrays in case.inputs.values())
    shapes, axes = weight_shapes(case.config), WEIGHTS | BIASES
    document = {
        "how": HOW,
        "case": case.sha256["weights"],
        "inputs": {
            "hidden_states": "[B,T,D]",
            "cos": "[B,T,H]",
            "sin": "[B,T,H]",
            "d_output": "[B,T,D], the gradient at the output",
        }
        | ({"attention_mask": "[B,1,T,S], added to the scores; the probes have none"} if padded else {}),
        "equations": EQUATIONS,
        "config": asdict(case.config),
        "sizes": case.config.sizes() | {"B": B, "T": T, "S": T},
        "weights": {name: {"letters": axes[name], "shape": shape} for name, shape in shapes.items()},
        "runs": runs,
        "stages": [
            {
                "name": name,
                "equation": EQUATION[name],
                "direction": direction(name),
                "letters": letters(name) or " ".join(axes[name.removeprefix("d_")]),
            }
            for name in whole(case.config)
        ],
    }
    files.append(folder / "case.json")
    try:
        files[-1].write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise BadInput(f"{files[-1]}: cannot be written ({error.strerror}); choose another directory") from error
    return files


def answers(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """The trace files in these folders and of these names, by the folder that they lie in. Raises BadInput."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise BadInput(f"--trace {path}: holds no .safetensors file")
        for file in files:
            if not file.is_file():
                raise BadInput(f"--trace {file}: no such file or folder")
            found.setdefault(f"{file.parent.as_posix()}/", []).append(file)
    return found


def land(traces: Answers, case: Case, judge: Judging, settings: Sequence[Setting]) -> None:
    """Put the trace files before the judge. Raises BadInput for one that cannot be read, or of no run of this case."""
    runs = {setting.label: setting for setting in [*settings, *PROBES]}
    for name, files in traces.items():
        for file in files:
            if file.stem not in runs:
                known = ", ".join(runs)
                raise BadInput(f"--trace {file}: its name is none of this comparison's runs: {known}")
            with open_tensors(file, "write it again") as opened:
                told = (opened.metadata() or {}).get("case", case.sha256["weights"])
            if told != case.sha256["weights"]:
                raise BadInput(f"--trace {file}: computed from another case; choose it by the flags that exported it")
            judge.land(name, runs[file.stem], {"": str(file)})
