"""What follows from the seconds of a benchmark's rounds: ratios, shares and exponents; and the schema of its result.

results   of each implementation, dtype, seq_len and direction: the seconds of each round; ratio, to the baseline,
          and matmul_share, of the rate of a large matrix product (see `operations`), both taken within a round; of
          the three, median and quartiles. peak_bytes that its process held, working_bytes of them that it did not
          hold before the call (see `harness.timed`), compile_seconds; null where there is none
growth    the exponents with which median seconds and working_bytes grow with seq_len, fitted to the largest three
left_out  what was not measured, and why; `failed` where it was tried
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness import artifact
from harness.artifact import BOOL, COUNT, INDEX, NUMBER, SIZE, TEXT, array, nullable, record, table
from harness.runners import IMPLEMENTATIONS, LIBRARIES, TILED
from harness.timed import DIRECTIONS, MATMUL, MATMUL_SIZE
from impls.spec import AttentionConfig

Run = Mapping[str, Any]  # dtype, seq_len, direction

BASELINE = "hf-sdpa"
"""Ratios are to this one: sdpa without a mask, which is causal by itself, as the model calls it without padding."""
NAMES = ("hf-eager", BASELINE, "hf-sdpa+mask", *LIBRARIES, *IMPLEMENTATIONS, *TILED)
DTYPES = ("float32", "bfloat16")


def rows(
    run: Run, seconds: Mapping[str, Sequence[float]], prepared: Mapping[str, Any], config: AttentionConfig, device: str
) -> list[dict[str, Any]]:
    """A result for each implementation, from the seconds of its rounds, in order, and what it said when prepared."""
    base, matmul = (np.array(seconds[name]) if name in seconds else None for name in (BASELINE, MATMUL))
    work = operations(config, run["seq_len"], run["direction"]) / (2 * MATMUL_SIZE[device] ** 3)
    result = []
    for name, each in seconds.items():
        if name == MATMUL:
            continue
        own, memory = np.array(each), prepared[name]["memory"] or {"peak": None, "working": None}
        result.append(
            {
                "implementation": name,
                **run,
                "seconds": spread(own) | {"rounds": [float(f"{value:.4g}") for value in own]},
                "ratio": None if base is None else spread(own / base),
                "matmul_share": None if matmul is None else spread(work * matmul / own),
                "peak_bytes": memory["peak"],
                "working_bytes": memory["working"],
                "compile_seconds": prepared[name]["compile_seconds"],
            }
        )
    return result


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles, to four digits."""
    quartiles = np.percentile(values, [50, 25, 75])
    return {key: float(f"{value:.4g}") for key, value in zip(("median", "q1", "q3"), quartiles, strict=True)}


def operations(config: AttentionConfig, seq_len: int, direction: str) -> float:
    """Multiplications and additions in the layer's products, B = 1: the projections and, at and below the diagonal,
    Q K^T and A V. A backward has two products for each of the forward's; what a kernel computes again does not count.
    """
    T, size = seq_len, config.sizes()
    projections = 2 * T * size["D"] * (2 * size["NH"] + 2 * size["KH"])
    attention = 2 * (2 * size["NH"] * T * (T + 1) / 2)
    return (projections + attention) * (3 if direction == "forward+backward" else 1)


def exponent(points: Mapping[int, float]) -> float | None:
    """The slope of the line through log y over log T by least squares; None for fewer than two points."""
    if len(points) < 2:
        return None
    return float(np.polyfit(np.log([*points]), np.log([*points.values()]), 1)[0])


def growth(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The exponents of each implementation, dtype and direction, from its largest three lengths."""
    kinds = dict.fromkeys((each["implementation"], each["dtype"], each["direction"]) for each in results)
    found = []
    for kind in kinds:
        own = [each for each in results if (each["implementation"], each["dtype"], each["direction"]) == kind]
        largest = sorted(own, key=lambda each: each["seq_len"])[-3:]
        time = exponent({each["seq_len"]: each["seconds"]["median"] for each in largest})
        memory = exponent({each["seq_len"]: each["working_bytes"] for each in largest if each["working_bytes"]})
        found.append(
            dict(zip(("implementation", "dtype", "direction"), kind, strict=True))
            | {"seq_lens": [each["seq_len"] for each in largest]}
            | {key: value and round(value, 3) for key, value in (("seconds", time), ("working_bytes", memory))}
        )
    return found


SPREAD = record(open=True, median=SIZE, q1=SIZE, q3=SIZE)
RUN: dict[str, Any] = {"implementation": {"enum": NAMES}, "dtype": {"enum": DTYPES}, "direction": {"enum": DIRECTIONS}}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "attention-check benchmark",
    **record(
        schema_version={"const": artifact.SCHEMA_VERSION},
        date=artifact.SCHEMA["properties"]["date"],
        command=TEXT,
        device={"enum": ["cpu", "gpu"]},
        batch_size=COUNT,
        sizes=table(COUNT),  # of the layer, by the letters of the dimension key
        rounds=COUNT,
        baseline={"const": BASELINE},
        matmul=record(size=COUNT, gflops=nullable(SPREAD)),
        load_average=SIZE,  # of the minute before
        results=array(
            record(
                **RUN,
                seq_len=COUNT,
                seconds=SPREAD,
                ratio=nullable(SPREAD),
                matmul_share=nullable(SPREAD),
                peak_bytes=nullable(COUNT),
                working_bytes=nullable(INDEX),
                compile_seconds=nullable(SIZE),
            )
        ),
        growth=array(record(**RUN, seq_lens=array(COUNT), seconds=nullable(NUMBER), working_bytes=nullable(NUMBER))),
        left_out=array(record(**{**RUN, "implementation": TEXT}, seq_len=COUNT, reason=TEXT, failed=BOOL)),
        environment=record(open=True, cpu=TEXT, cores=COUNT, versions=table(nullable(TEXT))),
    ),
}
"""JSON Schema, draft 2020-12; the tests hold a result to it."""
