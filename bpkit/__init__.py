"""Helpers of the book *Follow the Gradient*: read, record and debug computation graphs."""

from bpkit.graph import Graph, trace
from bpkit.record import Recording, record

__all__ = ["Graph", "Recording", "record", "trace"]
