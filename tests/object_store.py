"""An S3 object store on loopback: moto's, behind a server that a test may stop, or that may cut connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Environ = dict[str, Any]
BUCKET = "bucket"


class Cut(Exception):
    """Error that closes the connection without an answer."""


class Forbidden(Exception):
    """Error of a client without access."""


class ObjectStore:
    """Store with one bucket. It accepts any keys."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # an extra

        self._moto = DomainDispatcherApplication(create_backend_app)
        self.door: Callable[[Environ], None] = lambda environ: None
        """is asked about every request before moto; raises Cut or Forbidden"""
        self._serve(port=0)

    def _serve(self, port: int) -> None:
        from moto.server import MotoRequestHandler
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, type: str, message: str, *arguments: Any) -> None: ...

        self._server = make_server("127.0.0.1", port, self._app, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _app(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        try:
            self.door(environ)
        except Cut:
            environ["wsgi.input"].read(min(1, int(environ.get("CONTENT_LENGTH") or 0)))  # amid the body
            environ["werkzeug.socket"].shutdown(2)
            raise ConnectionAbortedError from None
        except Forbidden:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        return self._moto(environ, start_response)

    @property
    def port(self) -> int:
        return self._server.server_port

    def go_away(self) -> None:
        """Stop listening. Stored objects are kept."""
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        self._serve(self.port)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Return a store with the bucket, whose address fsspec knows."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # one of before would go where it went then
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr(s3fs.S3FileSystem, "retries", 2)
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield store
    store.go_away()
    s3fs.S3FileSystem.clear_instance_cache()
