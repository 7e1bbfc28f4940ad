"""Helpers of the book *Follow the Gradient*: read, record and debug computation graphs."""

from bpkit.diagnosis.checkup import checkup
from bpkit.diagnosis.watch import watch
from bpkit.graph import Graph, trace
from bpkit.nonfinite import find_nonfinite
from bpkit.numeric import AuditReport, audit, directional_check, numerical_gradient
from bpkit.record import Recording, record

__all__ = [
    "AuditReport",
    "Graph",
    "Recording",
    "audit",
    "checkup",
    "directional_check",
    "find_nonfinite",
    "numerical_gradient",
    "record",
    "trace",
    "watch",
]
