"""The regression gate: two result sets, sample by sample."""
