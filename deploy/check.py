"""Find out why a site would not work, in words for the person who runs it."""

import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from deploy.keys import load_node_key
from deploy.problem import DeployError
from deploy.site import Site
from deploy.version import VERSION_HEADER, flower_version
from isoloco_flwr.pretraining.corpus import CorpusError, open_source

__all__ = ["Finding", "check_site"]

MIN_FREE_BYTES = 1_000_000_000
"""Room below which a state folder will not do even for a small model."""

_SECONDS = 10.0
"""Patience with the server."""

_AHEAD, _BEHIND = 5, 300
"""Seconds by which Flower lets a site's clock be ahead of and behind the server's."""

_EXPIRED, _NOT_YET_VALID, _OTHER_HOST = 10, 9, 62
"""OpenSSL's numbers for what is wrong with a certificate; the others are about its issuer."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    subject: str
    """What was looked at."""
    good: bool
    """Whether it will do."""
    text: str
    """What there is, or what is wrong and how to put it right, in one line."""
    passing: bool = False
    """Whether it may go away by itself, so that a site may start all the same."""


def check_site(site: Site) -> Iterator[Finding]:
    """Look at everything that a site needs, the site's own things first."""
    try:
        key = load_node_key(site.key)
        yield Finding("key", True, str(site.key))
    except DeployError as error:
        key = None
        yield Finding("key", False, str(error))
    yield _check_data(site.data)
    yield _check_disk(site.state)
    yield _check_device(site.device)
    yield from _check_server(site, key)


def _check_data(source: str) -> Finding:
    try:
        parts = open_source(source).num_parts()
    except CorpusError as error:
        return Finding("data", False, str(error))
    return Finding("data", True, f"{source}, {parts} parts")


def _check_disk(state: Path) -> Finding:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(state).free
    except OSError as error:
        return Finding("disk", False, f"state folder {state}: {error.strerror}")
    if not os.access(state, os.W_OK | os.X_OK):
        return Finding("disk", False, f"state folder {state} cannot be written to")
    if free < MIN_FREE_BYTES:
        text = (
            f"{free / 1e9:.2f} GB free in {state}: allowed is {MIN_FREE_BYTES / 1e9:g} GB or more"
        )
        return Finding("disk", False, text)
    return Finding("disk", True, f"{free / 1e9:.0f} GB free in {state}")


def _check_device(device: str) -> Finding:
    if device == "cpu":
        return Finding("device", True, "cpu")
    if find_spec("torch") is None:
        return Finding("device", False, "torch is not installed: pip install '.[pretraining]'")
    import torch  # takes seconds

    count = torch.cuda.device_count()
    gpus = [f"cuda:{index}" for index in range(count)]
    if device not in ("auto", *gpus, *(["cuda"] if gpus else [])):
        there = ", ".join(f"{gpu} ({torch.cuda.get_device_name(gpu)})" for gpu in gpus)
        text = f"device {device!r}: torch sees {there or 'no GPU'} here, allowed is auto, cpu"
        return Finding("device", False, ", ".join([text, *gpus]))
    if device == "auto":
        device = "cuda" if gpus else "cpu, there is no GPU that torch can use"
    return Finding("device", True, device)


def _check_server(site: Site, key: ec.EllipticCurvePrivateKey | None) -> Iterator[Finding]:
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}", site.server):
        text = f"server {site.server!r}: allowed is HOST:PORT, it is always spoken to with TLS"
        yield Finding("server", False, text)
        return
    try:
        context = _tls(site.authority)
        with httpx.Client(verify=context, timeout=_SECONDS) as client:
            answer = client.get(f"https://{site.server}/health")
    except DeployError as error:
        yield Finding("certificate", False, str(error))
        return
    except httpx.HTTPError as error:
        yield _explain(site, error)
        return
    if answer.status_code != httpx.codes.OK:
        text = f"{site.server} answers {answer.status_code}: is it the server of `deploy server`?"
        yield Finding("server", False, text)
        return
    yield Finding("server", True, f"{site.server} answers, its certificate is good")
    yield _check_version(answer.headers.get(VERSION_HEADER, ""))
    clock = _check_clock(answer.headers.get("date", ""))
    yield clock
    if key is not None and clock.good:
        yield _check_registration(site, key)


def _tls(authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=authority)
    except ssl.SSLError as error:
        raise DeployError(
            f"{authority} is no certificate: allowed is the server's ca.pem"
        ) from error
    except OSError as error:
        raise DeployError(f"{authority} cannot be read: {error.strerror}") from error
    return context


def _explain(site: Site, error: BaseException) -> Finding:
    """Say why there was no answer."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Finding("certificate", False, _explain_certificate(site, cause))
        if isinstance(cause, ssl.SSLError):
            text = f"{site.server} does not speak TLS (plain HTTP?): nothing is sent there"
            return Finding("server", False, text)
        if isinstance(cause, socket.gaierror):
            text = f"{site.server} is not known here: is the name right, does DNS work?"
            return Finding("server", False, text, passing=True)
        if isinstance(cause, ConnectionRefusedError):
            text = f"{site.server} refuses connections: is the server running, is the port right?"
            return Finding("server", False, text, passing=True)
    reason = str(error) or type(error).__name__
    text = f"{site.server} cannot be reached ({reason}): is a firewall in between?"
    return Finding("server", False, text, passing=True)


def _explain_certificate(site: Site, error: ssl.SSLCertVerificationError) -> str:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == _EXPIRED:
        return (
            f"the certificate of {site.server} has expired: its operator must renew it "
            f"(or the clock here is wrong, it says {now})"
        )
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of {site.server} is not valid yet: the clock here says {now}"
    host = site.server.rpartition(":")[0]
    if error.verify_code == _OTHER_HOST or "mismatch" in error.verify_message:
        return (
            f"the certificate of {site.server} is not for {host!r}: use a name that it was made "
            "for, or let its operator make one with --host"
        )
    return (
        f"the certificate of {site.server} was not made by the authority in {site.authority}: get "
        "ca.pem from the server's operator; if it is the right one, somebody is in between"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_version(server: str) -> Finding:
    here = flower_version()
    if here.split(".")[:2] != server.split(".")[:2]:
        text = f"flwr {here} here, {server or 'unknown'} at the server: allowed is the same version"
        return Finding("flwr", False, f"{text}, pip install flwr=={server}" if server else text)
    return Finding("flwr", True, here)


def _check_clock(date: str) -> Finding:
    try:
        ahead = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    except ValueError:
        return Finding("clock", False, f"the server says no time but {date!r}")
    if not -_BEHIND < ahead < _AHEAD:
        side = "ahead of" if ahead > 0 else "behind"
        text = (
            f"the clock here is {abs(ahead):.0f} s {side} the server's: set it (NTP), allowed is "
            f"{_AHEAD} s ahead to {_BEHIND} s behind"
        )
        return Finding("clock", False, text)
    return Finding("clock", True, f"within {max(1, round(abs(ahead)))} s of the server's")


def _check_registration(site: Site, key: ec.EllipticCurvePrivateKey) -> Finding:
    public = key.public_key()
    # With an interval that no site may have, the server looks the key up and changes nothing: a
    # site that is running goes on.
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0.0)
    try:
        with FleetHttpClient.from_server_address(
            site.server,
            insecure=False,
            root_certificates=site.authority.read_bytes(),
            interceptors=[NodeAuthHttpInterceptor(key, public)],
        ) as client:
            client.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        answer = FlowerError.from_json(error.response.text)
        if answer is not None and answer.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return Finding("registration", True, "the server knows this site's key")
        if answer is not None and answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            text = (
                f"the server does not know the key {site.key}: send the .pub beside it to the "
                "server's operator, who registers it"
            )
            return Finding("registration", False, text)
        reason = " ".join(error.response.text.split())[:200]
        text = f"the server refuses the key {site.key}: {reason or error.response.status_code}"
        return Finding("registration", False, text)
    except httpx.HTTPError as error:
        return _explain(site, error)
    return Finding("registration", True, "the server knows this site's key")
