"""Task suites: samples, prompts and official scores."""
