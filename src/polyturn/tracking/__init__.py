"""Records, shows, draws and watches the metrics of a run."""
