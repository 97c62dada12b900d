"""Who can reach the dashboard of a Ray cluster, which runs the programs that it is sent."""

from __future__ import annotations

import ipaddress
import json
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import psutil

_DEADLINE_S = 5.0


def open_dashboard() -> str | None:
    """Address of the dashboard of the cluster we are connected to, if other machines reach it without a token."""
    from ray._private.services import get_webui_url_from_internal_kv

    address: str | None = get_webui_url_from_internal_kv()
    return address if address and _is_reachable(address) and not _asks_for_token(address) else None


def _is_reachable(address: str) -> bool:
    """Whether it listens on more than the loopback interface.

    Ray names the address of its node for a dashboard that does. That of a cluster on the loopback interface alone is
    that one in any case, and the dashboard is on this machine: its socket tells.
    """
    place = urlsplit(f"//{address}")
    try:
        if not ipaddress.ip_address(place.hostname or "").is_loopback:
            return True
        sockets = psutil.net_connections("tcp")
    except (ValueError, psutil.AccessDenied):  # a name of its own; a system that does not let us look
        return True
    listening = [
        socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.laddr.port == place.port
    ]
    return any(ipaddress.ip_address(ip).is_unspecified for ip in listening)


def _asks_for_token(address: str) -> bool:
    """It says so itself; one that says nothing is of a Ray without tokens."""
    try:
        page = build_opener(ProxyHandler({})).open(f"http://{address}/api/authentication_mode", timeout=_DEADLINE_S)
        with page:
            return json.load(page)["authentication_mode"] == "token"
    except (OSError, ValueError, LookupError, TypeError):
        return False
