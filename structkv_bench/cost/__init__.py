"""What a cell takes before anything runs: FLOPs, bytes, peak memory and time, from shapes alone."""
