"""Target models: reading checkpoints, the paged cache, layers and one file per family."""
