"""`python -m expertserve` is the command `expertserve`."""

from expertserve.cli import main

if __name__ == "__main__":
    main()
