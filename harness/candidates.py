"""Somebody's own implementation: a Python function, or a trace that a program in any language wrote.

    function(weights, inputs, config) -> output, or a dict of stages with at least "output"

`weights` and `inputs` are dicts of NumPy arrays by the names of `impls.spec.WEIGHTS` and "hidden_states", "cos", "sin",
"d_output"; `config` is an AttentionConfig, and where its attention_bias is true, weights has `impls.spec.BIASES`, too.
Stages have the names and shapes of `impls.spec.STAGES`; a gradient is "d_" and the name of what it belongs to. Arrays
of NumPy, JAX and PyTorch are taken.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.case import BadInput
from harness.runners import Array, Run, Trace
from impls.spec import AttentionConfig

Function = Callable[[dict[str, Array], dict[str, Array], AttentionConfig], Any]


def load(spec: str) -> Run:
    """The function that `spec` names, "path/to/file.py:function" or "package.module:function", as a `run`.

    Its own folder is where it imports from, as if it were run there. Raises BadInput where there is no such function,
    and whatever its module raises.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        if found is None or found.loader is None or not Path(place).is_file():
            raise BadInput(f"--candidate {spec}: there is no file {place}")
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            raise BadInput(
                f"--candidate {spec}: there is no module {error.name}; give a file (port.py:{name}) or install it"
            ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"--candidate {spec}: {place} has no function {name}{hint}")
    return as_run(function)


def as_run(function: Function) -> Run:
    """The function as a `run`: in JAX's 64-bit mode where it is given float64.

    That raises TypeError where the function returns no array and no dict of them, or no float64 for float64, and
    whatever the function raises.
    """

    @functools.wraps(function)
    def run(
        weights: Mapping[str, Array], inputs: Mapping[str, Array], d_output: Array, config: AttentionConfig
    ) -> Trace:
        given = dict(weights), {**inputs, "d_output": d_output}, config
        if d_output.dtype != np.float64:
            return as_trace(function(*given))
        had_jax = "jax" in sys.modules
        with wide():
            trace = as_trace(function(*given))
        if not had_jax and "jax" in sys.modules:  # it imports JAX when it is called
            with wide():
                trace = as_trace(function(*given))
        for name, value in trace.items():
            if value.dtype != np.float64:
                raise TypeError(f"given float64, it returns {value.dtype.name} ({name})")
        return trace

    return run


def wide() -> contextlib.AbstractContextManager[Any]:
    """JAX's 64-bit mode, where JAX has been imported."""
    jax = sys.modules.get("jax")
    return jax.enable_x64(True) if jax is not None else contextlib.nullcontext()


def as_trace(result: Any) -> Trace:
    """What a function returned as a trace: a dict as it is, anything else as the output alone. Raises TypeError."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or result is None:
        raise TypeError(f"it returned {type(result).__name__}; expected the output array or a dict of stages")
    named = result if isinstance(result, Mapping) else {"output": result}
    trace = {}
    for name, value in named.items():
        if not isinstance(name, str):
            raise TypeError(f"it returned a dict with the key {name!r}; the keys are names of stages")
        if name == "__metadata__":
            raise TypeError("it returned an entry __metadata__, which no tensor in a file can be called")
        trace[name] = as_array(name, value)
    return trace


def as_array(name: str, value: Any) -> Array:
    """An array of NumPy, JAX or PyTorch as one of NumPy. Raises TypeError for anything else, and for other numbers."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a PyTorch tensor, perhaps on a GPU
        from impls import torch_attention

        return torch_attention.array(value.detach().cpu())
    if not hasattr(value, "__array__"):
        raise TypeError(f"{name} is a {type(value).__name__}; expected an array of NumPy, JAX or PyTorch")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; expected plain numbers")
    return np.asarray(value)
