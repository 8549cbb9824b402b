"""The orders replayed on lengths: predictions and their intervals."""
