"""Random harm to a cluster that trains (scripts/chaos), and what must hold all the same."""
