"""What energon reads: paths, splits, shards, and which data it was."""
