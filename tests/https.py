"""A server that speaks HTTP, over TLS or not, and is wrong in one way."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deploy.version import VERSION_HEADER, flower_version


@contextmanager
def listening(
    keys: Path | None, *, host: str = "127.0.0.1", version: str = "", ahead: float = 0
) -> Iterator[str]:
    """Serve HTTP, over TLS if there are keys, and yield HOST:PORT."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            self.send_header("date", self.date_time_string(datetime.now(UTC).timestamp() + ahead))
            self.send_header(VERSION_HEADER, version or flower_version())
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Answer) as server:
        if keys:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys / "server.pem", keys / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
