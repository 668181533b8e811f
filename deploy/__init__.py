"""The `tandem` command, and what places, shows and reports a run."""
