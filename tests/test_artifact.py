"""The artifact: rows, schema, exit status, and that nothing half-written is ever left."""

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import artifact

WHERE = {
    "layer": 0,
    "input": "chapter",
    "rope": "neutral",
    "dtype": "float32",
    "framework": "numpy",
    "against": "layer",
    "gate": "tolerance",
    "stage": "scores",
    "equation": "3.5",
    "direction": "forward",
    "measure": "max",
}


def framework(**changes: Any) -> dict[str, Any]:
    good = {
        "match": True,
        "max_abs_diff": 6.9e-6,
        "mean_abs_diff": 8.1e-7,
        "tolerance": {"max_abs": 2.3e-5, "rms": 1.9e-6, "rule": "noise", "unit_roundoff": 2**-24, "largest_share": 0.3},
        "structure": 4.1e-15,
        "structure_limit": 1e-12,
        "first_divergence": None,
        "not_checked": [],
        "seconds": 3.2,
        "error": None,
    }
    return good | changes


def differing(**changes: Any) -> dict[str, Any]:
    first = {"stage": "q_norm", "equation": "RMSNorm", "direction": "forward", "head": 3, "position": 5}
    first["explanation"] = "It is off by 3.2e-05 of its token's size."
    return framework(match=False, first_divergence=first, **changes)


def not_run(error: str = "No module named 'torch'") -> dict[str, Any]:
    none = dict.fromkeys(("max_abs_diff", "mean_abs_diff", "tolerance", "structure", "seconds"))
    return framework(**none, match=False, error=error)


def document(**changes: Any) -> dict[str, Any]:
    """A whole artifact, as a run of three implementations that all match leaves it."""
    sha = "0" * 64
    good = {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": "2026-11-30T02:00:00Z",
        "command": "python -m harness.compare",
        "model": "Qwen3-0.6B",
        "layers": [0],
        "batch_size": 1,
        "seq_len": 12,
        "setting": {"input": "chapter", "rope": "neutral", "dtype": "float32"},
        "match": True,
        "exit_status": 0,
        "max_abs_diff": 6.9e-6,
        "mean_abs_diff": 8.1e-7,
        "frameworks": {"numpy": framework(), "jax": framework(max_abs_diff=7.4e-6), "torch": framework()},
        "checks": [artifact.judged(6.9e-6, 2.3e-5, **WHERE)._asdict()],
        "blind_to": [],
        "pairwise": {"numpy/jax": {"max_abs_diff": 3e-6, "tolerance": 4.6e-5, "match": True}},
        "scaling": {"note": "", "head_sizes": [{"d_k": 16}], "parameters": {"equation": "3.12", "many_heads": 1}},
        "weights": {"source": {"kind": "seeded", "seed": 0}, "sha256": sha},
        "inputs": {"chapter": {"sha256": sha, "seed": 1}, "stress": {"sha256": sha, "seed": 2}},
        "reference": {"class": "Qwen3Attention", "attn_implementation": "eager", "versions": {"transformers": "5"}},
        "environment": {
            "python": "3.12",
            "platform": "Linux",
            "cpu": "a CPU",
            "cores": 2,
            "accelerator": None,
            "driver": None,
            "versions": {"numpy": "2", "flax": None},
            "matmul_bits": {"numpy": 24, "torch": None},
        },
    }
    return good | changes


def test_schema_is_a_schema_and_takes_a_document() -> None:
    jsonschema.Draft202012Validator.check_schema(artifact.SCHEMA)
    jsonschema.validate(document(), artifact.SCHEMA)
    failed = {"numpy": differing(), "torch": not_run()}
    jsonschema.validate(document(match=False, exit_status=1, frameworks=failed, max_abs_diff=None), artifact.SCHEMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_status": 2},
        {"date": "30 November 2026"},
        {"surprise": 1},
        {"frameworks": {"numpy": {"match": True}}},
        {"setting": {"input": "chapter", "rope": "none", "dtype": "float32"}},
        {"weights": {"source": {"kind": "seeded"}, "sha256": "abc"}},
        {"max_abs_diff": -1.0},
    ],
)
def test_schema_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document(**changes), artifact.SCHEMA)


def changed_everywhere(value: Any) -> Iterator[Any]:
    """The same JSON with one value in it changed, left out or added; each in turn."""
    for other in (None, True, 1, -1, 0.5, -0.5, "text", "traces/a", "traces/../a", [], {}, ["text"], {"text": 1}):
        if type(other) is not type(value) or other != value:
            yield other
    if isinstance(value, dict):
        yield value | {"surprise": 1}
        for name, each in value.items():
            yield {key: kept for key, kept in value.items() if key != name}
            yield from (value | {name: other} for other in changed_everywhere(each))
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in changed_everywhere(each))


def test_fault_finds_what_the_library_finds() -> None:
    """`fault` reads the schema as jsonschema does, a hundred times as fast, and says where."""
    library = jsonschema.Draft202012Validator(artifact.SCHEMA)
    failed = {"numpy": differing(), "torch": not_run()}
    whole = document(frameworks=failed, traces="traces/a-1")
    assert artifact.fault(whole) is None
    others = list(changed_everywhere(whole))
    assert len(others) > 1000 and sum(artifact.fault(other) is None for other in others) > 50
    for other in random.Random(0).sample(others, 300):
        assert (artifact.fault(other) is None) == library.is_valid(other), artifact.fault(other)
    del whole["frameworks"]["torch"]["error"]
    assert artifact.fault(whole) == "frameworks.torch.error is missing"


def test_schema_requires_every_field() -> None:
    for name in document():
        with pytest.raises(jsonschema.ValidationError, match=f"'{name}' is a required property"):
            jsonschema.validate({key: value for key, value in document().items() if key != name}, artifact.SCHEMA)


def test_schema_of_checks_is_row() -> None:
    properties = artifact.SCHEMA["properties"]["checks"]["items"]["properties"]
    assert tuple(properties) == artifact.Row._fields


@pytest.mark.parametrize(
    ("value", "match", "kept"),
    [
        (0.0, True, 0.0),
        (1.0, True, 1.0),
        (1.01, False, 1.01),
        (math.nan, False, None),
        (math.inf, False, None),
        (-math.inf, False, None),
    ],
)
def test_judged(value: float, match: bool, kept: float | None) -> None:
    row = artifact.judged(value, 1.0, **WHERE)
    assert (row.match, row.value) == (match, kept)


def test_exit_status() -> None:
    good, bad, absent = framework(), differing(), not_run()
    crashed_after_differing = differing(error="killed")
    assert artifact.exit_status({"numpy": good, "jax": good}) == 0
    assert artifact.exit_status({"numpy": good, "jax": bad}) == 1
    assert artifact.exit_status({"numpy": good, "jax": absent}) == 3
    assert artifact.exit_status({"numpy": absent, "jax": bad}) == 1
    assert artifact.exit_status({"numpy": crashed_after_differing}) == 1
    with pytest.raises(ValueError, match="no implementation"):
        artifact.exit_status({})


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "check.json"
    rows = [artifact.judged(value, 1.0, **WHERE) for value in (0.1 + 0.2, 5e-324, math.nan)]
    artifact.write(document(checks=rows), path)
    back = artifact.read(path)
    assert back == document(checks=[row._asdict() for row in rows])
    jsonschema.validate(back, artifact.SCHEMA)
    assert sum('"stage"' in line for line in path.read_text().splitlines()) == len(rows), "one row, one line"
    assert path.stat().st_mode & 0o777 == 0o644
    artifact.write(document(checks=[]), path)
    assert artifact.read(path)["checks"] == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, object()])
def test_failed_write_leaves_the_last_good_artifact(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "check.json"
    artifact.write(document(), path)
    with pytest.raises((ValueError, TypeError)):
        artifact.write(document(max_abs_diff=bad), path)
    assert artifact.read(path) == document()
    assert os.listdir(tmp_path) == ["check.json"]


def test_a_device_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    """/dev/stdout is one: renamed over, it would be gone for everybody. Its disk being full is an error as any."""
    artifact.write(document(), tmp_path / "check.json")
    (tmp_path / "link.json").symlink_to("check.json")
    artifact.write(document(seq_len=13), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and artifact.read(tmp_path / "check.json")["seq_len"] == 13
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        artifact.write(document(), tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo() and json.loads(reader.read()) == document()
    if Path("/dev/full").is_char_device():
        with pytest.raises(OSError, match="No space left"):
            artifact.write(document(), "/dev/full")
        assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_interrupted_write_leaves_the_last_good_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "check.json"
    artifact.write(document(), path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        artifact.write(document(seq_len=13), path)
    assert artifact.read(path) == document()
    assert os.listdir(tmp_path) == ["check.json"]


def test_read_refuses_what_is_no_artifact(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    with pytest.raises(OSError, match=r"check\.json"):
        artifact.read(path)
    for text in ("[]", "{"):
        path.write_text(text)
        with pytest.raises(ValueError):
            artifact.read(path)


def test_thousands_of_rows_are_quick_and_plain_json() -> None:
    rows = [artifact.judged(n * 1e-9, 1e-6, **WHERE) for n in range(2000)]
    back = json.loads(artifact.dumps(document(checks=rows)), parse_constant=lambda name: pytest.fail(name))
    assert len(back["checks"]) == 2000 and back["checks"][1500]["match"] is False
