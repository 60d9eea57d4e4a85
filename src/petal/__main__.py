"""`python -m petal` is the command `petal`."""

from petal.cli import main

main()
