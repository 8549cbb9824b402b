"""Read a sample of the data, to learn its lengths."""
