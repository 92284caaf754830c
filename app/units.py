"""Sizes and durations in words."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def time_text(seconds: float) -> str:
    """A duration in the unit that reads best."""
    if seconds < 600:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
