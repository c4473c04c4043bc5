"""How pictures of jaxmoe look: the parts of matplotlib's settings that the demo and the profiles share."""

from typing import Any

DOTS_PER_INCH = 150
STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
}
