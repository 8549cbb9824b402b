"""Policy `stream`: which block of a sorted pool leaves, on plain numbers."""
