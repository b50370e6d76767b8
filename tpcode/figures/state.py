"""What one parameter costs while it trains, as bars: one segment for each term, as long as its bytes."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcode.figures.style import INK, Picture, canvas, render

Recipe = Mapping[str, float]  # bytes per parameter, by the name of the term


def state_bars(recipes: Mapping[str, Recipe]) -> Picture:
    """One bar per recipe, cut into its terms, all on one scale in bytes per parameter.

    Args:
        recipes: for each recipe its terms in order, in bytes per parameter: {"fp32 Adam": {"weights": 4, ...}, ...}.

    Raises:
        ValueError: no recipe, a recipe without terms, or a term that is not at least 1 byte (its segment would have
            no room for its label).
    """
    _require_terms(recipes)
    longest = max(sum(terms.values()) for terms in recipes.values())
    with canvas(2 * _LEFT + longest * _BYTE, len(recipes) * _PANEL) as (figure, axes):
        for number, (name, terms) in enumerate(recipes.items()):
            _draw_bar(axes, number * _PANEL, name, terms)
        return render(figure, "state-bars", describe(recipes))


def describe(recipes: Mapping[str, Recipe]) -> str:
    """The picture in words."""
    bars = [
        f"{name}: {', '.join(f'{term} {size:g}' for term, size in terms.items())}; {sum(terms.values()):g} in all."
        for name, terms in recipes.items()
    ]
    return f"Bytes per parameter. {' '.join(bars)}"


def _require_terms(recipes: Mapping[str, Recipe]) -> None:
    if not recipes:
        raise ValueError("state_bars draws at least one recipe, and got none")
    for name, terms in recipes.items():
        if not terms:
            raise ValueError(f"the recipe {name!r} has no terms")
        for term, size in terms.items():
            if not size >= 1:
                raise ValueError(f"{name!r}: {term!r} has {size!r} bytes per parameter; a segment needs at least 1")


# ---- drawing, in points ---------------------------------------------------------------------------------------------

_LEFT, _BYTE = 8.0, 23.0
_PANEL, _HEAD, _BAR = 66.0, 16.0, 34.0


def _draw_bar(axes: Axes, top: float, name: str, terms: Recipe) -> None:
    """The ink alone, no ground: a term is no placement, and the three colours mean placements."""
    axes.text(_LEFT, top + 11, f"{name}: {sum(terms.values()):g} bytes", color=INK, weight="bold")
    x, y = _LEFT, top + _HEAD
    for term, size in terms.items():
        width = size * _BYTE
        axes.add_patch(Rectangle((x, y), width, _BAR, facecolor="none", edgecolor=INK, lw=1))
        axes.text(x + width / 2, y + 11, term, color=INK, ha="center", va="center_baseline", size=8)
        axes.text(x + width / 2, y + 24, f"{size:g}", color=INK, ha="center", va="center_baseline", weight="bold")
        x += width
