"""Entry point of an optimisation job's pod: handles signals at once, and only then imports what takes seconds."""

from __future__ import annotations

from penstock.process import exit_on_signal, open_closed_streams


def main() -> None:
    """See `penstock_optimizer.pod.main`."""
    open_closed_streams()
    exit_on_signal()
    from penstock_optimizer.pod.main import main as work

    work()


if __name__ == "__main__":
    main()
