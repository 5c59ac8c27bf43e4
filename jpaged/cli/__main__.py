"""`python -m jpaged.cli`: the command without its entry point."""

from jpaged.cli.app import main

if __name__ == "__main__":
    main()
