"""From trajectory groups to micro-batches: samples, filters, and the layout where targets are shifted."""
