"""`SyncMonitor` and what it needs while training runs."""
