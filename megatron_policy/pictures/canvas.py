"""A sheet of 800 pixels' width to draw boxes and text on, in pixels from its top left corner."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_policy.errors import ConfigError
from megatron_policy.extras import require

WIDTH, MARGIN = 800, 12
SMALL, NORMAL, LARGE = 10.0, 11.5, 15.0
"""Heights of fonts in pixels."""
INK, FAINT, RULE, PAPER = "#1a1a1a", "#4d4d4d", "#9a9a9a", "#ffffff"

SUFFIXES = (".svg", ".png")
_DPI, _SHARPNESS, _COLORS = 100, 2, 48
_DIGIT = 0.64
"""The width of a digit over the font's height."""


def check_picture(path: str | os.PathLike[str], option: str) -> Path:
    """The path, if a picture can be drawn there. ConfigError, which names `option`, for a suffix
    that is not known; MissingPackageError without matplotlib.
    """
    found = Path(path).expanduser()
    if found.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{option} {path} does not end in {' or '.join(SUFFIXES)}: give a file that does"
        )
    require("matplotlib")
    return found


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


class Canvas:
    """One sheet. Text is placed by its left end, its middle (`"center"`) or its right end, and by
    the middle of its height.
    """

    def __init__(self, height: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure((WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=PAPER)
        self._axes = self._figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self._axes.set_xlim(0, WIDTH)
        self._axes.set_ylim(height, 0)
        self._axes.axis("off")
        sheet: Any = FigureCanvasAgg(self._figure)
        self._renderer = sheet.get_renderer()

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = NORMAL,
        *,
        align: str = "left",
        color: str = INK,
        bold: bool = False,
    ) -> float:
        """Write a line; returns where it ends."""
        drawn: Any = self._axes.text(
            x,
            y,
            text,
            fontsize=size * 72 / _DPI,
            ha=align,
            va="center_baseline",
            color=color,
            fontweight="bold" if bold else "normal",
            parse_math=False,
        )
        return float(drawn.get_window_extent(self._renderer).x1)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = PAPER,
        edge: str = INK,
        hatch: str = "",
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle from its top left corner."""
        from matplotlib.patches import Rectangle

        style: dict[str, Any] = {"linewidth": 0.7, "linestyle": (0, (3, 2)) if dashed else "-"}
        colors: dict[str, Any] = {"facecolor": fill, "edgecolor": edge}
        self._axes.add_patch(Rectangle((x, y), width, height, hatch=hatch, **colors, **style))

    def line(
        self, x: float, y: float, to_x: float, to_y: float, color: str = RULE, dashed: bool = False
    ) -> None:
        """Draw a straight line."""
        style: Any = (0, (4, 2)) if dashed else "-"
        self._axes.plot((x, to_x), (y, to_y), color=color, linewidth=0.8, linestyle=style)

    def save(self, path: Path) -> None:
        """Write the sheet; the same sheet gives the same bytes."""
        from matplotlib import rc_context

        self._figure.set_dpi(_DPI * _SHARPNESS)
        if path.suffix.lower() == ".svg":
            # Names that are the same each time, and text as text.
            with rc_context({"svg.hashsalt": "megatron-policy", "svg.fonttype": "none"}):
                self._figure.savefig(path, metadata={"Date": None})
            return
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image  # which matplotlib needs itself

        sheet: Any = FigureCanvasAgg(self._figure)
        sheet.draw()
        # A palette makes the file a third as large, of a sheet that has few colours.
        drawn = Image.fromarray(np.asarray(sheet.buffer_rgba())).convert("RGB")
        drawn.quantize(_COLORS).save(path, optimize=True)


def number_fits(number: int, width: float, size: float = SMALL) -> bool:
    """Whether a number can be written within so many pixels."""
    return len(str(number)) * _DIGIT * size + 1 <= width
