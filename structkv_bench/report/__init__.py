"""Rows -> tables; no part of it imports torch."""
