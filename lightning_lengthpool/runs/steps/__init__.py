"""Step records: their columns, their sums, and the file `steps.csv`."""
