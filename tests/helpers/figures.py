"""Figures as they are drawn."""

import warnings

from matplotlib.figure import Figure

from lightning_lengthpool.report import figures


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def drawn(figure: Figure) -> Figure:
    """Draw it, with warnings (of a layout without room, a missing glyph) as errors; it must be of a page's width."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        width, height = size(figures.png(figure))
    assert width == 1440 and 300 < height < 1600
    return figure
