"""Entry point of a serving pod: installs the signal handlers before the imports, which take seconds."""

from __future__ import annotations

from penstock.process import exit_on_signal, open_closed_streams, without_collections


def main() -> None:
    """See `penstock_runtime.pod.main`."""
    open_closed_streams()
    exit_on_signal()
    with without_collections():
        from penstock_runtime.pod.main import main as serve
        from penstock_runtime.pod.supervisor import supervise

    supervise(lambda crashes: serve(crashes=crashes))


if __name__ == "__main__":
    main()
