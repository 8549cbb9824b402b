"""A run as a summary, figures and a page; runs side by side."""
