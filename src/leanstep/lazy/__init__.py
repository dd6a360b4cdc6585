"""One line in any training loop: the first step is recorded as it runs, the plan follows."""
