"""`harness.check`: the comparison from Python, for people's own test suites."""

import tempfile
from pathlib import Path
from typing import Any

from harness.artifact import Row
from harness.candidates import Function, as_run
from harness.compare import compare, make_parser
from harness.report.console import sentences
from harness.runners import Loaded


class Rows(list[Row]):
    """The rows of evidence. `match` says whether all of them hold, `str()` what differs, in words."""

    def __init__(self, document: dict[str, Any]):
        super().__init__(Row(**row) for row in document["checks"])
        self.match: bool = document["match"]
        self.words = "\n".join(f"{word}  {sentence}" for word, sentence in sentences(document))

    def __str__(self) -> str:
        return self.words


def check(
    function: Function,
    weights: str | Path | None = None,
    *,
    layer: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    rope: str = "both",
    dtype: str | None = None,
) -> Rows:
    """Compare a function with Hugging Face's layer, as `python -m harness.compare --candidate` does.

    function(weights, inputs, config): see `harness.candidates`; it runs here, in this process. The other arguments are
    the command's. Returns the rows, and raises nothing where something differs; a function that raises makes no row,
    and `str()` of them has its error. Raises BadInput (a ValueError) where the arguments are unusable.
    """
    given = {"weights": weights, "layer": layer, "batch": batch, "seq-len": seq_len, "seed": seed, "dtype": dtype}
    words = [word for flag, value in given.items() if value is not None for word in (f"--{flag}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        options = make_parser().parse_args([*words, "--rope", rope, "--out", folder, "--quiet"])
        options.impl = []
        here = {f"{getattr(function, '__qualname__', type(function).__name__)}()": Loaded(as_run(function), None)}
        return Rows(compare(options, "harness.check", here, Path(folder) / "weights"))
