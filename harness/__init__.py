"""The harness: makes a case, runs every implementation on it, judges what came out and reports it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.checking import Rows, check

__all__ = ["Rows", "check"]


def __getattr__(name: str) -> Any:
    """`harness.check`, loaded when it is asked for: the processes of a run need none of it."""
    if name in __all__:
        from harness import checking

        return getattr(checking, name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
