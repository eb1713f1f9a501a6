"""`python -m mrl` is the command `mrl`."""

from mrl.cli import main

if __name__ == "__main__":
    main()
