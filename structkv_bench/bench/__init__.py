"""Efficiency: methods timed on real text, in turn, beside what their FLOPs allow."""
