"""`python -m leanstep`."""

from leanstep.cli import main

if __name__ == "__main__":
    main()
