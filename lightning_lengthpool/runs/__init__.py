"""What a run wrote down, and what that tells."""
