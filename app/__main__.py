"""`python -m app`: the same as `draftmill`."""

from app.cli import main

if __name__ == "__main__":
    main()
