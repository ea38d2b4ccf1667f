"""The report's pictures: SVG for the inside of a page, drawn by matplotlib and coloured by the page's own CSS.

What is drawn is given as arrays and names; nothing here reads a file. Names that people choose stay out of the
pictures, except the labels of tokens. The same values give the same bytes.
"""

import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

INK, MUTED, RULE, ACCENT, BAD = (f"#01010{index}" for index in range(1, 6))
SERIES = tuple(f"#02020{index}" for index in range(1, 6))
"""Stand-ins: matplotlib draws in them, and the page's CSS says what they are, in light and in dark."""
PAINT = {INK: "currentColor", MUTED: "var(--muted)", RULE: "var(--rule)", ACCENT: "var(--accent)", BAD: "var(--bad)"}
PAINT |= {colour: f"var(--s{index})" for index, colour in enumerate(SERIES)}
LIGHT = {"muted": "#6a665e", "rule": "#e2ddd1", "accent": "#2b5f9e", "bad": "#b42318"}
LIGHT |= {"s0": "#2b6cb0", "s1": "#c05621", "s2": "#2f855a", "s3": "#805ad5", "s4": "#b7791f"}
"""The page's colours by day, for a picture that stands alone."""
MARKERS, SIGNS = "os^Dv", "●■▲◆▼"
"""Of each implementation, besides its colour: in a picture, and in text."""
HEADS, BINS = 16, 16
"""The most attention maps, and the most rows and columns of one: longer sequences are drawn in blocks."""
FORMATS = {8: ("bfloat16", "right"), 11: ("float16", "left"), 24: ("float32", "center"), 53: ("float64", "right")}
"""Significand bits of each dtype, and on which side of its line its name fits."""


def attention(probs_NTS: np.ndarray, tokens: Sequence[str] | None = None) -> Markup:
    """A map of weights [T,S] for each head, at most `HEADS`: rows ask, columns are read, the future is not drawn.

    Longer than `BINS`, a row is the mean of a block of queries and a column the sum of a block of keys, so that rows
    still sum to one. `tokens`: a label for each position (drawn where positions are not in blocks).
    """
    (N, T, _), edges = probs_NTS.shape, blocks(probs_NTS.shape[1], BINS)
    maps = np.add.reduceat(np.add.reduceat(probs_NTS[:HEADS], edges, axis=1), edges, axis=2)
    maps = maps / np.diff([*edges, T])[:, None]
    heads, n, _ = maps.shape
    labels = ["".join(c if c.isprintable() else "·" for c in token)[:12] for token in tokens or () if n == T][:T]
    margin, columns, size = 64 * bool(labels), min(4, heads), min(96.0, 24.0 * n)
    cell, rows = size / n, -(-heads // columns)
    corner = [(margin + (size + 14) * (head % columns), 18 + (size + 26) * (head // columns)) for head in range(heads)]
    with drawing(margin + columns * (size + 14), rows * (size + 26) + margin) as (figure, axes):
        stairs = [(0, 0), *((cell * (i + 1), cell * (i + down)) for i in range(n) for down in (0, 1)), (0, size)]
        shapes(axes, stairs, corner, RULE, np.full(heads, 0.7))
        t, s = np.tril_indices(n)
        at = [(x + cell * j, y + cell * i) for x, y in corner for i, j in zip(t, s, strict=True)]
        cells(axes, cell, at, maps[:, t, s].ravel(), ACCENT)
        for head, (x, y) in enumerate(corner):
            axes.text(x, y - 6, f"head {head}", color=MUTED, size=10)
            for place, label in enumerate(labels):
                along = cell * (place + 0.5)
                if head % columns == 0:
                    axes.text(x - 4, y + along, label, size=7, ha="right", va="center")
                if head >= heads - columns:
                    axes.text(x + along, y + size + 4, label, size=7, rotation=90, ha="center", va="top")
        logs = np.log2(probs_NTS, out=np.zeros_like(probs_NTS), where=probs_NTS > 0)
        entropy = -np.sum(probs_NTS * logs, axis=2).mean(axis=1)[:heads]
        few, many = int(np.argmin(entropy)), int(np.argmax(entropy))
        return svg(
            figure,
            "attention",
            f"Attention weights of {heads} of {N} heads, each a lower triangle of {n} by {n} squares: nothing is read "
            f"from the future. Averaged over positions, head {few} is the most concentrated, with {entropy[few]:.1f} "
            f"bits of entropy, and head {many} the most even, with {entropy[many]:.1f}.",
        )


def bits(
    stages: Sequence[str], series: Mapping[tuple[int, str], Mapping[str, float]], due: Mapping[str, float]
) -> Markup:
    """How many bits each stage agrees in: a row for each stage, a mark for each implementation and dtype.

    Args: the stages; (index of the implementation, dtype) -> stage -> bits; the bits that are due at a stage.
    float64 is drawn hollow; 53 bits in a shorter dtype mean that nothing is rounded there.
    """
    left, step, top, width = 108.0, 17.0, 40.0, 450.0
    at = {name: top + step * (row + 1 + 1.2 * name.startswith("d_")) for row, name in enumerate(stages)}
    bottom, scale, count = max(at.values()) + step, (width - left - 8) / 54, 1 + max(index for index, _ in series)
    with drawing(width, bottom + 4) as (figure, axes):
        for bit, (name, side) in FORMATS.items():
            axes.plot([left + scale * bit] * 2, [top, bottom], color=MUTED, linewidth=0.8, dashes=(3, 3))
            axes.text(left + scale * bit, top - 18, str(bit), size=11, weight="bold", ha=side)
            axes.text(left + scale * bit, top - 6, name, size=9, color=MUTED, ha=side)
        for name, y in at.items():
            axes.plot([left, width - 8], [y, y], color=RULE, linewidth=0.8)
            axes.text(left - 6, y, name, size=9, ha="right", va="center")
            if name in due:
                axes.plot([left + scale * due[name]] * 2, [y - 4, y + 4], color=MUTED, linewidth=1.5)
            if any(dtype != "float64" and values.get(name, 0) >= 53 for (_, dtype), values in series.items()):
                axes.text(left + scale * 25.5, y, "exact", size=8, color=MUTED, va="center", style="italic")
        for (index, dtype), values in series.items():
            shown = {name: value for name, value in values.items() if dtype == "float64" or value < 53}
            axes.scatter(
                [left + scale * max(value, 0) for value in shown.values()],
                [at[name] + 10 * ((index + 0.5) / count - 0.5) for name in shown],
                s=17,
                marker=MARKERS[index % len(MARKERS)],
                facecolors="none" if dtype == "float64" else SERIES[index % len(SERIES)],
                edgecolors=SERIES[index % len(SERIES)],
                linewidths=0.9,
                zorder=3,
            )
        said = "; ".join(
            f"{dtype} {min(found):.1f} to {max(found):.1f}"
            for dtype in dict.fromkeys(dtype for _, dtype in series)
            if (found := [v for (_, other), values in series.items() if other == dtype for v in values.values()])
        )
        said = f"Bits in which each of {len(stages)} stages agrees: {said}. Lines mark the formats' 8, 11, 24 and 53."
        return svg(figure, "bits", said)


def by_head(
    key: str, values_NT: np.ndarray, largest: float, unit: str, mark: tuple[int, int] | None = None, bad: bool = False
) -> Markup:
    """One square for each head and position, full at `largest`: where an error sits.

    Args: `key`, unique on the page; values of at least 0 and their unit; (head, position) to be outlined. More than 24
    positions are drawn in blocks, by their largest value.
    """
    edges = blocks(values_NT.shape[1], 24)
    values = np.maximum.reduceat(values_NT, edges, axis=1)
    (N, n), left, top = values.shape, 22.0, 14.0
    cell = max(5.0, min(17.0, 216.0 / n, 320.0 / N))
    with drawing(left + max(n * cell, 90) + 2, top + N * cell + 16) as (figure, axes):
        at = [(left + cell * t, top + cell * head) for head in range(N) for t in range(n)]
        cells(axes, cell, at, np.full(values.size, 0.4), RULE)
        cells(axes, cell, at, values.ravel() / (largest or 1), BAD if bad else ACCENT)
        axes.text(left, top - 5, "head ↓  position →", size=9, color=MUTED)
        for head in range(0, N, -(-N // 8)):
            y = top + cell * (head + 0.5)
            axes.text(left - 5, y, str(head), size=9, color=MUTED, ha="right", va="center")
        for block in range(0, n, -(-n // 6)):
            x = left + cell * (block + 0.5)
            axes.text(x, top + N * cell + 3, str(edges[block]), size=9, color=MUTED, ha="center", va="top")
        if mark:
            block = int(np.searchsorted(edges, mark[1], side="right")) - 1
            x, y = left + cell * block - 0.5, top + cell * mark[0] - 0.5
            axes.plot([x, x + cell, x + cell, x, x], [y, y, y + cell, y + cell, y], color=INK, linewidth=1.4)
        head, position = divmod(int(np.argmax(values_NT)), values_NT.shape[1])
        said = (
            f"{values_NT.shape[0]} heads by {values_NT.shape[1]} positions: median {np.median(values_NT):.2g} {unit}, "
        )
        said += f"largest {np.max(values_NT):.2g} at head {head}, position {position}."
        return svg(figure, key, f"Error of {said}")


def scaling(head_sizes: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """Three pictures, each with its title: variance, entropy and Jacobian against d_k, with and without √d_k."""
    d_k, pictures = [each["d_k"] for each in head_sizes], []
    left, right, base = 34.0, 228.0, 150.0
    for key, title, low, high, ticks in (
        ("variance", "Variance of a score", -0.3, 3.2, {"1": 0, "10": 1, "100": 2, "1000": 3}),
        ("entropy_bits", "Entropy of the softmax, bits", 0, 6.4, {"0": 0, "2": 2, "4": 4, "6": 6}),
        ("jacobian_norm_median", "Size of its Jacobian, median", 0, 0.36, {"0": 0, "0.1": 0.1, "0.2": 0.2, "0.3": 0.3}),
    ):
        said = []
        with drawing(234, 172) as (figure, axes):
            for text, tick in ticks.items():
                y = base - (tick - low) / (high - low) * (base - 6)
                axes.plot([left, right], [y, y], color=RULE, linewidth=0.8)
                axes.text(left - 5, y, text, size=9, color=MUTED, ha="right", va="center")
            x = np.linspace(left + 8, right - 8, len(d_k))
            for place, size in list(zip(x, d_k, strict=True))[::2]:
                axes.text(place, base + 5, str(size), size=9, color=MUTED, ha="center", va="top")
            for way, colour, marker in (("unscaled", SERIES[1], "s"), ("scaled", SERIES[0], "o")):
                values = np.array([each[way][key] for each in head_sizes], float)
                heights = np.log10(np.maximum(values, 1e-3)) if key == "variance" else values
                heights = base - (heights - low) / (high - low) * (base - 6)
                axes.plot(x, heights, color=colour, marker=marker, markersize=4, linewidth=1.6)
                said.append(f"{way} from {values[0]:.2g} to {values[-1]:.2g}")
            text = f"{title} as d_k grows from {d_k[0]} to {d_k[-1]}: {'; '.join(said)}."
            pictures.append((title, svg(figure, key, text)))
    return pictures


def against_length(panels: Sequence[tuple[str, Mapping[str, Mapping[int, float]]]], columns: int) -> Markup:
    """Values above 0 against the length, both on logarithmic scales: a panel for each (title, name -> length -> value).

    A colour is a family, the part of a name before its first "-"; a dashed line holds the whole square of scores.
    """
    names = list(dict.fromkeys(name for _, values in panels for name in values))
    families = list(dict.fromkeys(name.partition("-")[0] for name in names))
    side, high, gap, left, top, foot = 172.0, 150.0, 46.0, 34.0, 22.0, 40.0
    rows = -(-len(panels) // columns)
    width, height = columns * (side + gap), rows * (top + high + foot) + 16 * -(-len(names) // 5)

    def style(name: str) -> dict[str, Any]:
        family, _, kind = name.partition("-")
        colour, index = SERIES[families.index(family) % len(SERIES)], families.index(family)
        hollow = kind in ("", "eager")
        dashes = (4, 2) if hollow else (1, 1.5) if kind in ("dpa", "sdpa+mask") else (None, None)
        marker = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "markeredgecolor": colour}
        marker["markerfacecolor"] = "none" if hollow else colour
        return {"color": colour, "linewidth": 1.3, "dashes": dashes, **marker}

    with drawing(width, height) as (figure, axes):
        for index, (title, values) in enumerate(panels):
            x0, y0 = left + (side + gap) * (index % columns), top + (top + high + foot) * (index // columns)
            axes.text(x0 - 4, y0 - 8, title, size=10, weight="bold")
            lengths = sorted({T for own in values.values() for T in own})
            found = [value for own in values.values() for value in own.values()]
            if not found:
                continue
            low, most = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)) + 0.02)
            span = math.log(lengths[-1] / lengths[0]) or 1.0
            for power in range(low, most + 1):
                y = y0 + high * (1 - (power - low) / (most - low))
                axes.plot([x0, x0 + side], [y, y], color=RULE, linewidth=0.8)
                axes.text(x0 - 5, y, f"{10.0**power:,.12g}", size=9, color=MUTED, ha="right", va="center")
            at = {T: x0 + 8 + (side - 16) * math.log(T / lengths[0]) / span for T in lengths}
            for T, x in at.items():
                axes.text(x, y0 + high + 6, f"{T:,}", size=8, color=MUTED, ha="right", va="top", rotation=45)
            for name, own in values.items():
                heights = [y0 + high * (1 - (math.log10(value) - low) / (most - low)) for value in own.values()]
                axes.plot([at[T] for T in own], heights, **style(name))
        for index, name in enumerate(names):
            x, y = left + (width - left) / 5 * (index % 5), rows * (top + high + foot) + 10 + 16 * (index // 5)
            axes.plot([x, x + 11, x + 22], [y - 3] * 3, **style(name))
            axes.text(x + 28, y, name, size=10)
        said = "; ".join(
            f"{title}: " + ", ".join(f"{name} {own[max(own)]:.3g} at {max(own):,}" for name, own in values.items())
            for title, values in panels
        )
        return svg(figure, "benchmark", f"Against the length, on logarithmic scales. {said}.")


def standalone(picture: Markup) -> str:
    """A picture as a file of its own, dark on white."""
    text = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], picture)
    name = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return text.replace('style="', 'style="background: white; color: #1f1e1c; font-family: sans-serif; ', 1).replace(
        "<svg ", f"<svg {name} ", 1
    )


def blocks(length: int, most: int) -> list[int]:
    """Where each of at most `most` blocks of `length` positions begins."""
    count = min(length, most)
    return [index * length // count for index in range(count)]


# --------------------------------------------------------------------------------------------------------- matplotlib


def matplotlib() -> Any:
    """The library, imported with all that a drawing needs; it keeps its list of fonts beside the code."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).resolve().parents[2] / ".cache" / "matplotlib"))
    import matplotlib as library
    import matplotlib.backends.backend_svg
    import matplotlib.collections
    import matplotlib.figure

    return library


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """A figure of so many pixels, and axes whose unit is one of them, from the upper left corner."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "attention-check", "text.parse_math": False}
    with (library := matplotlib()).rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a token's letter that matplotlib's font lacks: the browser has it
        figure = library.figure.Figure((width / 72, height / 72), dpi=72, frameon=False)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        yield figure, axes


def cells(axes: Any, size: float, at: Sequence[tuple[float, float]], shares: np.ndarray, colour: str) -> None:
    """Squares that are the more opaque the larger their share, from 0 to 1."""
    side = size - min(0.7, size / 8)
    shapes(axes, [(0, 0), (side, 0), (side, side), (0, side)], at, colour, shares)


def shapes(axes: Any, corners: Any, at: Sequence[tuple[float, float]], colour: str, shares: np.ndarray) -> None:
    """The same polygon at several places, each as opaque as its share."""
    from matplotlib.collections import PolyCollection
    from matplotlib.transforms import Affine2D

    opacity = np.round(np.clip(np.nan_to_num(shares, nan=1), 0, 1), 2)
    rgb = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    seen = np.flatnonzero(opacity > 0.01).tolist()
    if seen:
        shape = PolyCollection(
            [[(x, -y) for x, y in corners]],
            offsets=[at[index] for index in seen],
            offset_transform=axes.transData,
            facecolors=[(*rgb, opacity[index]) for index in seen],
            linewidths=0,
        )
        shape.set_transform(Affine2D())
        axes.add_collection(shape, autolim=False)


def svg(figure: Any, key: str, said: str) -> Markup:
    """The figure for the inside of a page: no size, font or date of its own, its colours the page's, its ids unique."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    FigureCanvasSVG(figure).print_svg(file)
    _, _, text = file.getvalue().partition("<svg")
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2]
    text = re.sub(r"^[^>]*>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"#0[12]0[12]0[1-5]\b", lambda found: PAINT[found[0]], text)
    text = re.sub(r'font-family: [^;"]*;? ?| transform="rotate\(-0 [^"]*"|(?<=\s)\s+', "", text)
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', text))
    names = {name: f"{key}-{index}" for index, name in enumerate(used)}
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", text)
    text = re.sub(r'(?:xlink:)?(href="|url\()#([^")]+)', lambda found: f"{found[1]}#{names[found[2]]}", text)
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(said)}" style="--width: {width}px">{text}'
    )
