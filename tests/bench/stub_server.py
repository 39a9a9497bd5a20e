"""A server of known behaviour: `python stub_server.py PORT [DELAY_MS] [STATUS] [BURN]`.

Answers every POST after a delay with a status, the body's length in the answer and `x-inference-time: 1.5`. BURN is
`threads` for a thread that escapes its CPUs, `turns` for that status every second time and 200 else, `child` for a
child process, `sleepy` for one that ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time


async def main(port: int, delay: float, status: int, habit: str) -> None:
    ready = asyncio.Event()
    if habit == "sleepy":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if habit == "threads":
        escaped = threading.Event()

        def escape() -> None:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            escaped.set()
            time.sleep(600)

        threading.Thread(target=escape, daemon=True).start()
        escaped.wait()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            posts = 0
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                is_post = head.startswith(b"POST")
                if is_post:
                    await asyncio.sleep(delay)
                content = b'{"bytes":%d}' % len(body)
                posts += is_post
                code = status if is_post and (habit != "turns" or posts % 2) else 200
                headers = b"x-inference-time: 1.5\r\ncontent-type: application/json\r\ncontent-length: %d" % len(
                    content
                )
                writer.write(b"HTTP/1.1 %d X\r\n%b\r\n\r\n%b" % (code, headers, content))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    print("stub: listening", flush=True)
    ready.set()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    arguments = [*sys.argv[1:], "", "", ""]
    if arguments[3] == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    asyncio.run(main(int(arguments[0]), float(arguments[1] or 0) / 1e3, int(arguments[2] or 200), arguments[3]))
