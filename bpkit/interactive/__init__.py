"""What would this picture be a step later, or at another rate?  Introduced in chapter 3.

Pictures that a reader moves with a slider; every number in them is the notebook's own.
"""

from bpkit.interactive.frames import Frame, Frames
from bpkit.interactive.nan import nan_walk
from bpkit.interactive.network import network_walk
from bpkit.interactive.rate import rate_slider

__all__ = ["Frame", "Frames", "nan_walk", "network_walk", "rate_slider"]
