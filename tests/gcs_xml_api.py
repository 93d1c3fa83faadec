"""The XML API of Google Cloud Storage, before fake-gcs-server. `python -m gcs_xml_api PORT` prints its own port.

`obstore` and `deltalake` use the XML API. fake-gcs-server has its reads, lists and deletes. It has no puts but those of
signed URLs, and these ignore conditions. So puts become uploads of the JSON API: fake-gcs-server checks their
conditions, and gives each object its generation. Parts of a large object are kept here until the last one has arrived.
The server ends when its standard input is closed.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import secrets
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

_uploads: dict[str, dict[int, bytes]] = {}


@dataclass
class _Answer:
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def error(cls, status: int, code: str, message: str) -> _Answer:
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return cls(status, text.encode(), {"Content-Type": "application/xml; charset=UTF-8"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake_gcs_server: int  # its port

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        bucket, _, name = parts.path.lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if self.command in ("PUT", "POST") or "uploadId" in query:
            answer = self._change(bucket, unquote(name), query, body)
        else:
            answer = self._ask(self.command, self.path)
        if answer.status in (404, 500) and self._ask("GET", f"/storage/v1/b/{bucket}").status == 404:
            # fake-gcs-server does not say which of the two is missing
            answer = _Answer.error(404, "NoSuchBucket", "The specified bucket does not exist.")
        self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _change(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> _Answer:
        upload = query.get("uploadId", "")
        match self.command:
            case "POST" if "uploads" in query:
                upload = secrets.token_hex(8)
                _uploads[upload] = {}
                return _Answer(200, _xml("InitiateMultipartUploadResult", UploadId=upload))
            case _ if upload and upload not in _uploads:
                return _Answer.error(404, "NoSuchUpload", "The specified upload does not exist.")
            case "PUT" if upload:
                _uploads[upload][int(query["partNumber"])] = body
                return _Answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
            case "POST" if upload:
                kept = _uploads.pop(upload)
                numbers = [int(each) for each in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
                done = self._put(bucket, name, b"".join(kept[number] for number in numbers))
                done.content = _xml("CompleteMultipartUploadResult", ETag=done.headers.get("ETag", ""))
                return done
            case "DELETE":
                del _uploads[upload]
                return _Answer(204)
            case "PUT" if not query and "x-goog-copy-source" not in self.headers:
                return self._put(bucket, name, body)
        return _Answer.error(501, "NotImplemented", f"{self.command} {self.path}")

    def _put(self, bucket: str, name: str, content: bytes) -> _Answer:
        """An upload by the JSON API, with the condition of this request."""
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        if condition := self.headers.get("x-goog-if-generation-match"):
            path += f"&ifGenerationMatch={condition}"
        answer = self._ask("POST", path, content)
        if answer.status == 412:
            message = "At least one of the pre-conditions you specified did not hold."
            return _Answer.error(412, "PreconditionFailed", message)
        if answer.status != 200:
            return answer
        made = json.loads(answer.content)
        return _Answer(200, headers={"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]})

    def _ask(self, method: str, path: str, body: bytes | None = None) -> _Answer:
        """Ask fake-gcs-server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.fake_gcs_server, timeout=60)
        # it knows requests of the XML API by their host
        sent = {"Host": f"127.0.0.1:{self.connection.getsockname()[1]}"}
        if wanted := self.headers.get("Range"):
            sent["Range"] = wanted
        try:
            connection.request(method, path, body, sent)
            found = connection.getresponse()
            return _Answer(found.status, found.read(), dict(found.getheaders()))
        finally:
            connection.close()

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "date") and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD" and answer.status != 204:
            self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)


def _xml(name: str, **children: str) -> bytes:
    inside = "".join(f"<{child}>{value}</{child}>" for child, value in children.items())
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{inside}</{name}>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client that has given up is no error."""


def main() -> None:
    _Handler.fake_gcs_server = int(sys.argv[1])
    server = _Server(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
