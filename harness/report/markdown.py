"""The verdict in Markdown, for the summary page of a GitHub job."""

from collections.abc import Mapping
from typing import Any

from harness.report.console import number, sentences, share, subject, verdict


def markdown(document: Mapping[str, Any]) -> str:
    """What was compared, the table and the verdict in words; ends with a line of its own."""
    lines = [
        f"### Attention check: {'match' if document['match'] else 'differs'}",
        "",
        escaped(subject(document)),
        "",
        "| | max \\|diff\\| | tolerance | used | structure | verdict |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, framework in document["frameworks"].items():
        tolerance = framework["tolerance"] or {}
        figures = [framework["max_abs_diff"], tolerance.get("max_abs")]
        cells = [
            escaped(name),
            *map(number, figures),
            share(tolerance.get("largest_share")),
            number(framework["structure"]),
            verdict(framework),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- **{word}** {escaped(sentence)}" for word, sentence in sentences(document)), ""]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """The text as it is, whatever signs of Markdown and HTML stand in it."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|~" else sign for sign in text.replace("\n", " "))
