"""The one command line. It drives the runtime and the optimiser from the outside; nothing imports it."""
