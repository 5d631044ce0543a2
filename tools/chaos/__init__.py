"""A training on several hosts, under faults that come at random: `make chaos N=60 SEED=1`."""
