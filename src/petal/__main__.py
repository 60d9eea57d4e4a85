"""`python -m petal`, and `torchrun -m petal`."""

from petal.cli import main

if __name__ == "__main__":
    main()
