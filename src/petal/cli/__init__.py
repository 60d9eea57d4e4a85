"""The command `petal`: the only layer that prints, picks devices and seeds."""
