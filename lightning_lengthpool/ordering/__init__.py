"""Pure: settings, orders, costs, efficiency formulas, length files. NumPy and the standard library only."""
