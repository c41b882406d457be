"""From a run's work to shards, here in several processes or as a Slurm array, and how far they are."""
