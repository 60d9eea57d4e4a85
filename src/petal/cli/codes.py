"""Exit codes of the commands; docs/reference/commands.md says which command has which."""

DONE = 0
PARTLY = 1          # done, and something in it failed: a check, a run of a sweep, an image that cannot be read
REFUSED = 2         # what was asked for cannot be done; said in one line, or as usage
LOST = 3            # another process of the same run is gone
INTERRUPTED = 130   # Ctrl-C
