"""A proxy that passes requests on to a server, and spoils some of the answers."""

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler

PIECE, PAUSE_S = 1 << 14, 0.02
MD5 = re.compile(r"\b[0-9a-f]{32}\b")
HIDDEN = "AKIA0123456789"  # in the text of errors, where S3 has parts of the signature
SENT_ON = ("If-None-Match", "If-Match", "Content-Type", "x-amz-copy-source")
PASSED_ON = ("Content-Type", "ETag", "Last-Modified", "Content-Range", "Accept-Ranges")


@dataclass
class Proxy:
    """``fault`` gives the fault for the path of a request and how many there were for it; None for none.

    A fault is the number of a status, with S3's name for the error or without, or one of: cut (half of the
    body, then the end of the connection), short (half of the body as if it were all), long (a byte more),
    flip (a bit in the middle), altered (flip, with the right ETag), stall (half, then silence), slow (pieces
    with pauses), drip (bytes with pauses), whole (no parts of files), more (all, of which there is said to be
    more), shift (a range that is said to be another), "to URL" (a redirect), "body TEXT" (another body).
    ``asked`` are the paths and ranges.
    ``sending`` gives the faults of files that are sent, of which ``sent`` are the paths.
    ``opaque`` makes the ETags of another kind than MD5.
    """

    server: int
    fault: Callable[[str, int], str | None] = lambda path, count: None
    sending: Callable[[str, int], str | None] = lambda path, count: None
    sent: list[str] = field(default_factory=list)
    opaque: bool = False
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    port: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ranges_of(self, name: str) -> list[str | None]:
        """The ranges that were asked for of a file."""
        return [found for path, found in self.asked if path.endswith(name)]

    def block(self, name: str) -> tuple[threading.Event, threading.Event]:
        """Let requests for a file wait; the events of the first one, and of their release."""
        asked, released = threading.Event(), threading.Event()

        def fault(path: str, count: int) -> None:
            if path.endswith(name):
                asked.set()
                released.wait(60)

        self.fault = fault
        return asked, released

    def fault_of(self, path: str, asked: str | None) -> str:
        self.asked.append((path, asked))
        return self.fault(path, sum(each == path for each, _ in self.asked)) or ""


@contextmanager
def faulty_proxy(server: int) -> Iterator[Proxy]:
    """Run a proxy for the server at this port, in threads."""
    proxy = Proxy(server)

    class Handler(Spoiling):
        plan = proxy

    with listening(Handler) as proxy.port:
        try:
            yield proxy
        finally:
            proxy.ended.set()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of connections at once


@contextmanager
def listening(handler: type[BaseRequestHandler]) -> Iterator[int]:
    """Handle connections in threads; the port."""
    listener = Listener(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield listener.server_address[1]
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def answered(
    server: int, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer of the server at this port, and its body."""
    with closing(http.client.HTTPConnection("127.0.0.1", server, timeout=30)) as connection:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()


class Quiet(BaseHTTPRequestHandler):
    """One connection, of a client that may be killed."""

    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def received(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))


class Spoiling(Quiet):
    plan: Proxy

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        fault = self.plan.fault_of(self.path.partition("?")[0], asked)
        with suppress(ConnectionError):
            kind, _, text = fault.partition(" ")
            if kind.isdigit():
                self.refuse(int(kind), text or "Broken")
            elif kind == "to":
                self.answer(302, {"Location": text}, b"")
            elif kind == "body":
                self.answer(200, {}, text.encode())
            else:
                self.pass_on(fault, None if fault == "whole" else asked)

    def do_POST(self) -> None:
        self.relay(self.received())

    do_HEAD = do_DELETE = do_POST  # noqa: N815

    def do_PUT(self) -> None:
        """Pass a file on; a fault is a status, cut, flip, slow, or lost (passed on, answered with 405)."""
        path = self.path.partition("?")[0]
        self.plan.sent.append(path)
        fault = self.plan.sending(path, self.plan.sent.count(path)) or ""
        with suppress(ConnectionError):
            if fault == "cut":
                self.close_connection = True
                self.rfile.read(min(PIECE, int(self.headers["Content-Length"]) // 2))
                return
            body = self.received()
            if fault.isdigit():
                self.refuse(int(fault), "Broken")
                return
            if fault == "slow":
                time.sleep(10 * PAUSE_S)
            self.relay(body if fault != "flip" else bytes([body[0] ^ 1]) + body[1:], 405 * (fault == "lost"))

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {}, f"<Error><Code>{code}</Code><Key>{HIDDEN}</Key></Error>".encode())

    def relay(self, body: bytes, status: int = 0) -> None:
        """Pass a request on as it is, and its answer, if there is a ``status`` with that."""
        headers = {name: value for name in SENT_ON if (value := self.headers[name]) is not None}
        answer, found = answered(self.plan.server, self.command, self.path, headers, body)
        length = answer.headers["Content-Length"]
        passed = {name: value for name in PASSED_ON if (value := answer.headers[name])}
        if self.plan.opaque:
            passed |= {"ETag": turned(passed["ETag"])} if "ETag" in passed else {}
        with suppress(ConnectionError):
            self.answer(status or answer.status, passed, found, length=int(length) if length else None)

    def pass_on(self, fault: str, asked: str | None) -> None:
        answer, body = answered(self.plan.server, "GET", self.path, {"Range": asked} if asked else {})
        if self.plan.opaque and b"<ListBucketResult" in body:
            body = turned(body.decode()).encode()
        headers = {name: value for name in PASSED_ON if (value := answer.headers[name])}
        if answer.status not in (200, 206) or not fault or fault == "whole":
            return self.answer(answer.status, headers, body)
        self.close_connection = True
        if fault != "altered":
            headers.pop("ETag", None)
        return self.spoil(fault, answer.status, headers, body)

    def spoil(self, fault: str, status: int, headers: dict[str, str], body: bytes) -> None:
        half = len(body) // 2
        match fault:
            case "cut" | "stall":
                self.answer(status, headers, body[:half], length=len(body))
                self.plan.ended.wait(600 if fault == "stall" else 0)
            case "short":
                self.answer(status, headers, body[:half])
            case "shift":
                self.answer(status, headers | {"Content-Range": f"bytes 0-{len(body) - 1}/{2**40}"}, body)
            case "more":
                self.answer(status, headers, body, length=2 * len(body))
            case "long":
                self.answer(status, headers, body + b"\0")
            case "flip" | "altered":
                self.answer(status, headers, body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :])
            case "slow" | "drip":
                self.answer(status, headers, b"", length=len(body))
                size = PIECE if fault == "slow" else 1
                for start in range(0, len(body), size):
                    self.wfile.write(body[start : start + size])
                    self.wfile.flush()
                    if self.plan.ended.wait(PAUSE_S):
                        return
            case _:
                raise ValueError(fault)

    def answer(self, status: int, headers: dict[str, str], body: bytes, *, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def turned(text: str) -> str:
    """The text with the digits of each MD5 in reverse."""
    return MD5.sub(lambda found: found[0][::-1], text)
