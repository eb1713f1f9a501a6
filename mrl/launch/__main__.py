"""`python -m mrl.launch` starts the ranks of a run."""

from mrl.launch import main

if __name__ == "__main__":
    main()
