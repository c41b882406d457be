"""structkv-bench: a benchmark harness for KV-cache compression in long-context language models."""

__version__ = "0.1.0"
