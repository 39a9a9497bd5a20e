"""`python -m penstock_operator`."""

from penstock_operator.main import main

if __name__ == "__main__":
    main()
