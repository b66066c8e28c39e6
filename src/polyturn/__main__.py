"""`python -m polyturn`: the command line, for launchers that start modules."""

from polyturn.cli.main import main

if __name__ == "__main__":
    main()
