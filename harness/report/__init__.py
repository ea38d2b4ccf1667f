"""Views of an artifact: each reads the document and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(artifact: Mapping[str, Any], path: str | Path | None = None) -> None:
    """Print the verdict of an artifact, which lies at `path`, to standard output."""
    from harness.report.console import make_console, print_verdict  # rich takes its time, and not everybody prints

    print_verdict(artifact, make_console(), path)
