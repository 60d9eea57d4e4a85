"""`python -m petal` is the command `petal`."""

from petal.cli import main

if __name__ == "__main__":
    main()
