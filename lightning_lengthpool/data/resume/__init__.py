"""All ranks' iterator states, from a checkpoint and into one."""
