"""The artifact of a run: its schema, written atomically, and the exit status that follows from it.

The evidence is one flat list of rows (`checks`); a new gate adds rows, not schema.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.files import parse

SCHEMA_VERSION = 1


class Row(NamedTuple):
    """One check: what was compared, where, by how much it differs, and how much it may."""

    layer: int
    input: str  # "chapter", "stress", …
    rope: str  # "neutral" | "model"
    dtype: str
    framework: str
    against: str  # "truth" (the layer in float64), "hf-eager" (it in the run's dtype), "own inputs", "exact", …, a name
    gate: str  # "structure" | "local" | "tolerance" | "probes" | "precision" | "contract"
    stage: str
    equation: str  # "3.5", or "RMSNorm" and "RoPE", which have no number
    direction: str  # "forward" | "backward"
    measure: str  # what `value` is: "relative", "rms", "max", …
    value: float | None  # None where it is NaN or infinite, which never matches
    limit: float
    match: bool


def judged(value: float, limit: float, match: bool | None = None, **where: Any) -> Row:
    """The row of a value that was held against `limit`: by default it may be at most that, else `match` has decided.

    NaN and infinity never match. Both are kept to six digits, after they were compared. `where`: Row's other fields.
    """
    finite = math.isfinite(value)
    match = bool(finite and (value <= limit if match is None else match))
    return Row(**where, value=float(f"{value:.6g}") if finite else None, limit=float(f"{limit:.6g}"), match=match)


def exit_status(frameworks: Mapping[str, Mapping[str, Any]]) -> int:
    """0 all match, 1 something differs, 3 an implementation could not run (and nothing differs).

    A difference outranks an error: it is a finding about the mathematics and stays true once the other implementation
    is repaired, while a missing package says nothing about any equation. One that differed before it crashed differs.
    Raises ValueError where nothing was judged: a verdict on nothing is not a match.
    """
    if not frameworks:
        raise ValueError("no implementation was judged")
    results = frameworks.values()
    if any(not each["match"] and (each["error"] is None or each["first_divergence"]) for each in results):
        return 1
    return 3 if any(each["error"] is not None for each in results) else 0


def write(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the artifact, whole or not at all: a temporary file beside `path`, synced to disk, then renamed over it.

    Rows may be `Row`s or dicts and take one line each. Values are plain Python: NumPy's raise TypeError, NaN and
    infinity ValueError. Whatever fails, the last good artifact stays as it was and no temporary file is left.
    Into a pipe or a device, such as /dev/stdout, it is written as it stands.
    """
    path = Path(path).resolve()  # of a link, what it points at
    text = dumps(document)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", errors="backslashreplace", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # a temporary file is private, an artifact is not
            os.replace(file.name, path)
        except BaseException:  # also Ctrl-C
            os.unlink(file.name)
            raise


def dumps(document: Mapping[str, Any]) -> str:
    """The artifact as JSON text: indented, and one line for each row of `checks`."""
    parts = []
    for key, value in document.items():
        if key == "checks":
            rows = (encode(row._asdict() if isinstance(row, Row) else row) for row in value)
            text = "[\n" + ",\n".join(rows) + "\n]"
        else:
            text = encode(value, indent=2)
        parts.append(f"{encode(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def encode(value: Any, indent: int | None = None) -> str:
    """JSON proper: no NaN, no Infinity; on one line without spaces, or indented."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators, allow_nan=False, ensure_ascii=False)


def read(path: str | Path) -> dict[str, Any]:
    """The artifact at `path`. Raises OSError where there is none, ValueError where it is not one JSON object."""
    path = Path(path)
    if path.exists() and not path.is_file():  # to open a pipe is to wait
        raise ValueError("a folder or a device, where a file should be")
    document = parse(path.read_bytes())
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    return document


# ------------------------------------------------------------------------------------------------------------- schema


def record(*, open: bool = False, optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields; `open` allows more of them."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": open}


def table(value: Any) -> dict[str, Any]:
    """The schema of an object from names to `value`."""
    return {"type": "object", "additionalProperties": value}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT, NUMBER, BOOL = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
INDEX, COUNT, SIZE = (
    {"type": "integer", "minimum": 0},
    {"type": "integer", "minimum": 1},
    {"type": "number", "minimum": 0},
)
SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
ROPE = {"enum": ["neutral", "model"]}
ROPES = {"enum": ["neutral", "model", "any"]}
DTYPE = {"enum": ["float64", "float32", "bfloat16", "float16"]}
DIRECTION = {"enum": ["forward", "backward"]}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "attention-check artifact",
    **record(
        optional=("traces",),
        schema_version={"const": SCHEMA_VERSION},
        date={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)$"},  # UTC
        command=TEXT,
        model=TEXT,
        layers=array(INDEX),
        traces={"type": "string", "pattern": r"^traces(/[\w-][\w.-]*)?$"},  # where they lie, beside the artifact
        batch_size=COUNT,
        seq_len=COUNT,
        setting=record(input=TEXT, rope=ROPE, dtype=DTYPE),  # of the headline figures, also those of `frameworks`
        match=BOOL,
        exit_status={"enum": [0, 1, 3]},
        max_abs_diff=nullable(SIZE),
        mean_abs_diff=nullable(SIZE),
        frameworks=table(
            record(
                optional=("exchanged",),
                match=BOOL,
                max_abs_diff=nullable(SIZE),
                mean_abs_diff=nullable(SIZE),
                tolerance=nullable(record(open=True, max_abs=SIZE, rms=SIZE, rule=TEXT, unit_roundoff=SIZE)),
                structure=nullable(SIZE),
                structure_limit=nullable(SIZE),
                first_divergence=nullable(
                    record(
                        stage=TEXT,
                        equation=TEXT,
                        direction=DIRECTION,
                        head=nullable(INDEX),
                        position=nullable(INDEX),
                        explanation=nullable(TEXT),
                    )
                ),
                not_checked=array(TEXT),
                seconds=nullable(SIZE),
                exchanged=nullable(table(table(SIZE))),  # between devices: bytes for each token, by pass and collective
                error=nullable(TEXT),  # why it could not run
            )
        ),
        checks=array(
            record(
                layer=INDEX,
                input=TEXT,
                rope=ROPES,
                dtype=DTYPE,
                framework=TEXT,
                against=TEXT,
                gate=TEXT,
                stage=TEXT,
                equation=TEXT,
                direction=DIRECTION,
                measure=TEXT,
                value=nullable(NUMBER),
                limit=NUMBER,
                match=BOOL,
            )
        ),
        pairwise=table(record(open=True, max_abs_diff=nullable(SIZE), tolerance=nullable(SIZE), match=BOOL)),
        blind_to=array(record(layer=INDEX, name=TEXT, says=TEXT, reason=TEXT)),
        scaling=record(
            open=True,
            optional=("caching",),
            note=TEXT,
            head_sizes=array({"type": "object"}),
            parameters=table({"type": ["integer", "string"]}),
            caching=record(
                open=True,
                tokens=COUNT,
                later_moved=INDEX,
                earlier_moved=INDEX,
                earlier_moved_unmasked=INDEX,
                earlier=INDEX,
                apart=SIZE,
            ),
        ),
        weights=record(
            open=True,
            source=record(open=True, kind={"enum": ["seeded", "checkpoint", "hub"]}),
            sha256={"anyOf": [SHA256, table(SHA256)]},  # of the file, or of each file where there are several layers
        ),
        inputs=table(record(open=True, optional=("seed",), sha256=SHA256, seed=nullable({"type": "integer"}))),
        reference={
            "type": "object",
            "properties": {"class": TEXT, "attn_implementation": TEXT, "versions": table(TEXT)},
            "required": ["class", "attn_implementation", "versions"],
        },
        environment=record(
            open=True,
            python=TEXT,
            platform=TEXT,
            cpu=TEXT,
            cores=COUNT,
            accelerator=nullable(TEXT),
            driver=nullable(TEXT),
            versions=table(nullable(TEXT)),
            matmul_bits=table(nullable(INDEX)),
        ),
    ),
}
"""JSON Schema, draft 2020-12. Tests hold artifacts to it with a library for that, a run what it reads with `fault`."""

KINDS: dict[type, set[str]] = {
    dict: {"object"}, list: {"array"}, str: {"string"}, bool: {"boolean"}, type(None): {"null"},
    int: {"integer", "number"}, float: {"number"},
}  # fmt: skip


def fault(value: Any, schema: Mapping[str, Any] = SCHEMA, where: str = "it") -> str | None:
    """Where and how parsed JSON differs from a schema of the keywords used here, in words; None where it does not."""
    if options := schema.get("anyOf"):
        faults = [fault(value, option, where) for option in options]
        return faults[0] if all(faults) else None
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds and not kinds & KINDS[type(value)]:
        return f"{where} is no {' or '.join(sorted(kinds))}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed and not any(type(value) is type(each) and value == each for each in allowed):  # true is not 1
        return f"{where} is not {' or '.join(map(str, allowed))}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"{where} is below {schema['minimum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"{where} does not match {schema['pattern']}"
    return next(filter(None, faults_inside(value, schema, where)), None)


def faults_inside(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str | None]:
    """What `fault` says of the items of an array, or of the members of an object."""
    if isinstance(value, list) and "items" in schema:
        yield from (fault(each, schema["items"], f"{where}[{i}]") for i, each in enumerate(value))
    if isinstance(value, dict):
        at = "" if where == "it" else f"{where}."
        yield from (f"{at}{name} is missing" for name in schema.get("required", ()) if name not in value)
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, each in value.items():
            if name in known or isinstance(others, dict):
                yield fault(each, known.get(name, others), f"{at}{name}")
            elif not others:
                yield f"{at}{name} is unknown"
