"""Prefill and decode over compressed caches, for any method."""
