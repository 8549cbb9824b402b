"""From an energon data set to a rank's batches, with Lightning."""
