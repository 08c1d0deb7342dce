"""SGLang: a server loads each version from its path."""

from __future__ import annotations

from typing import Any, final

from gradfs.engines import server
from gradfs.engines.pinned import Pinned
from gradfs.errors import Refused


@final
class Server(server.Server):
    """A server of SGLang, which takes versions by `/update_weights_from_disk`.

    `options` are fields of that request, such as `flush_cache` or `abort_all_requests`. SGLang's `weight_version` is the
    number of the version that it has loaded.
    """

    def __init__(self, url: str, timeout: float = 600.0, **options: Any) -> None:
        super().__init__(url, timeout)
        self._options = options

    def load(self, version: Pinned) -> int:
        body = {"model_path": version.hf, "weight_version": str(version.version), **self._options}
        answer = self.post("/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise Refused(f"{self.url} has not loaded version {version.version}: {answer}")
        return version.version
