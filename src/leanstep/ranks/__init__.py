"""Several processes: one plan for all, and gradients averaged by hand."""
