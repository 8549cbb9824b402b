"""The advisor: scan the data, simulate, recommend."""
