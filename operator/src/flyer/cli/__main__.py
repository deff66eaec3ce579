"""`python -m flyer.cli`."""

from flyer.cli.main import main

if __name__ == "__main__":
    main()
