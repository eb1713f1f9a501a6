"""`python -m mrl` = `mrl`."""

from mrl.cli import main

if __name__ == "__main__":
    main()
