"""Views of an artifact: each reads the document and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(artifact: Mapping[str, Any], folder: Path | None = None) -> None:
    """Print the verdict of an artifact, which lies in `folder` with its report, to standard output."""
    from harness.report.console import make_console, print_verdict  # rich takes its time, and not everybody prints

    print_verdict(artifact, make_console(), folder)
