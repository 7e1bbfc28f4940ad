"""Helpers of the book *Follow the Gradient*: read, record and debug computation graphs."""

from bpkit.graph import Graph, trace
from bpkit.numeric import AuditReport, audit, directional_check, numerical_gradient
from bpkit.record import Recording, record

__all__ = [
    "AuditReport",
    "Graph",
    "Recording",
    "audit",
    "directional_check",
    "numerical_gradient",
    "record",
    "trace",
]
