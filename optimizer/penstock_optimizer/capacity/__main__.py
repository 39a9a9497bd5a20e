"""Entry point of a serving pod on Inferentia: installs the signal handlers before the imports, which take seconds."""

from __future__ import annotations

from penstock.process import exit_on_signal, open_closed_streams


def main() -> None:
    """See `serving_pod`."""
    open_closed_streams()
    exit_on_signal()
    from penstock_optimizer.capacity.serving_pod import measure_before_ready
    from penstock_runtime.pod.main import main as serve

    serve(measure_before_ready)


if __name__ == "__main__":
    main()
