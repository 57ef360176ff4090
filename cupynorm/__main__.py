"""`python -m cupynorm` is `cupynorm`."""

from cupynorm.cli import main

if __name__ == "__main__":
    main()
