"""How the processes of a run know and ask each other, without a collective."""
