"""HTTP/1.1 on asyncio: listening socket, connections, limits, request and response values."""
