"""`python -m penstock_operator`."""

from penstock_operator.main import main

main()
