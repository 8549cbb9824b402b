"""What a person would forget to look at."""
