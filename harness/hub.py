"""A model of the hub, of which only the bytes asked for are read.

The only module that uses the network, and it does so through huggingface_hub's own client: that one's endpoint, cache,
token, offline mode and proxies hold. Small files (config.json, the index, tokenizer.json) go into its cache. Of a file
of weights that does not lie there already, the header and the asked byte ranges are read, and not kept.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, http_stream_backoff, logging

from harness.case import BadInput
from harness.checkpoint import SINGLE, Checkpoint, Piece

CONNECTIONS = 5  # that may fail in a row, none of them bringing a MiB, before a range is given up
REVISION = r"(?!.*\.\.)[^\s~^:?*\[\\/][^\s~^:?*\[\\]*"  # what git allows, and no path out of the cache


def open_hub(model: str, revision: str | None = None) -> "HubModel":
    """A model of the hub by its id, at a branch, tag or commit (default: main). Raises BadInput, in one line."""
    return HubModel(model, revision)


class HubModel(Checkpoint):
    """A model of the hub at one commit.

    A branch or tag is asked for at the hub; where that cannot be reached, what the local cache knows of it holds.
    `bytes_fetched` counts what came over the network of files of weights, headers included.
    """

    way_out = "leave --model out for the seeded weights, or give a checkpoint on this machine by --weights DIR"

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.model, self.revision = model, revision
        super().__init__(model)

    def path(self, file: str) -> Path | None:
        path = try_to_load_from_cache(self.model, file, revision=self.commit or self.revision)
        return Path(path) if isinstance(path, str) else None

    def single(self) -> str:
        return SINGLE

    def whole(self, file: str) -> bytes | None:
        with self.asking(file):
            if self.revision is not None and not re.fullmatch(REVISION, self.revision):
                raise self.bad(f"--revision {self.revision!r} is no branch, tag or commit")
            if self.commit is None and self.path(file) is None:
                # hf_hub_download would try for minutes to reach a hub that is not there: see first whether it is
                url, headers = hf_hub_url(self.model, file, revision=self.revision), build_hf_headers()
                timeout = constants.HF_HUB_ETAG_TIMEOUT
                hf_raise_for_status(http_backoff("HEAD", url, headers=headers, timeout=timeout, retry_on_exceptions=()))
            try:
                path = Path(hf_hub_download(self.model, file, revision=self.commit or self.revision))
            except RemoteEntryNotFoundError:
                return None
            self.commit = path.parent.name  # <cache>/models--…/snapshots/<commit>/config.json
            if not re.fullmatch(r"[0-9a-f]{40}", self.commit):
                raise FileMetadataError("the answer names no commit")
            return path.read_bytes()

    def fetch(self, file: str, start: int, stop: int) -> Piece | None:
        """Bytes start to stop over the network; where a connection is cut, the next one takes over."""
        data, size, failed = bytearray(), 0, 0
        with self.asking(file):
            while len(data) < stop - start:
                before = len(data)
                try:
                    size = self.append(data, file, start + before, stop)
                except RemoteEntryNotFoundError:
                    return None
                except HfHubHTTPError:  # a status: waited for where waiting helps
                    raise
                except HTTPError as error:  # the connection
                    failed = 1 if len(data) - before >= 2**20 else failed + 1
                    if failed == CONNECTIONS:
                        raise
                    logging.get_logger().warning(f"{file}: {error}; trying again in {2**failed} s")
                    time.sleep(2**failed)
        return data, size

    def append(self, data: bytearray, file: str, start: int, stop: int) -> int:
        """Appends bytes start to stop of the file, fewer where it raises an HTTPError; returns the file's size."""
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout, end = constants.HF_HUB_DOWNLOAD_TIMEOUT, len(data) + stop - start
        url = hf_hub_url(self.model, file, revision=self.commit)
        with http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as response:
            hf_raise_for_status(response)
            size = self.answered(response, file, start, stop)
            for chunk in response.iter_raw():
                self.bytes_fetched += len(chunk)
                data += chunk
                if len(data) > end:
                    raise self.bad(f"the server sends more than bytes {start}-{stop - 1}", file)
        if len(data) < end:
            raise HTTPError("the answer ends too early")
        return size

    def answered(self, response: Any, file: str, start: int, stop: int) -> int:
        """The file's size, if the answer is to have bytes start to stop; nothing of its body is read yet."""
        if response.status_code == 200:
            raise self.bad("the server, or a proxy, ignores Range and would send the whole file", file)
        content, encoding = (response.headers.get(key, "") for key in ("Content-Range", "Content-Encoding"))
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content)
        if response.status_code != 206 or match is None or encoding not in ("", "identity"):
            raise self.bad(f"the server answers {response.status_code} and {content!r} where a range was asked", file)
        if (int(match[1]), int(match[2])) != (start, stop - 1) or int(match[3]) < stop:
            raise self.bad(f"the server sends {content} where {start}-{stop - 1} was asked", file)
        return int(match[3])

    @contextmanager
    def asking(self, file: str) -> Iterator[None]:
        """Whatever the client raises becomes a BadInput of one line, which says what is wrong and the ways out."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:  # a malformed proxy or token raises what it likes
            raise self.bad(self.reason(error, file)) from error

    def reason(self, error: Exception, file: str) -> str:
        """In plain words. The client's own message may have lines, and the signed address of a file in it."""
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        hub, token = constants.ENDPOINT, "a token that may read it (HF_TOKEN, or hf auth login)"
        known = (
            (OfflineModeIsEnabled, f"offline (HF_HUB_OFFLINE is set), and {file} is not in the local cache"),
            (HFValidationError, f"no model id of the hub, such as Qwen/Qwen3-0.6B ({error})"),
            (GatedRepoError, f"a gated model: accept its terms at {hub}/{self.model} and give {token}"),
            (RevisionNotFoundError, f"has no revision {self.commit or self.revision}"),
            (EntryNotFoundError, f"has no {file} at revision {self.commit or self.revision or 'main'}"),
            (RepositoryNotFoundError, f"{hub} has no such model, or it is private and needs {token}"),
            (FileMetadataError, f"what answers at {hub} is no hub; check HF_ENDPOINT and the proxy"),
        )
        for kind, words in known:
            if isinstance(error, kind):
                return words
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            if status in (401, 403):
                return f"no access to {file} ({hub} answers {status}); it needs {token}"
            again = ", also after waiting; try later" if status in (408, 429) or status >= 500 else ""
            return f"{hub} answers {status} for {file}{again}"
        if isinstance(error, HTTPError):
            return f"{hub} cannot be reached for {file} ({type(error).__name__}: {error})"
        return f"{file} cannot be fetched ({type(error).__name__}: {error})"
