"""Two hosts on one machine: network namespaces, each with an address and a loopback of its own, and a cable between.

What one host can reach of the other goes over that cable, whose speed can be limited, and which can be cut. Making them
takes root and `ip`, limiting them `tc` (Debian: iproute2). They are removed at the end, after a failure, a kill or
Ctrl-C as well.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NoNamespaces(RuntimeError):
    """Network namespaces cannot be made here; the message says why, and what would help."""


def run_command(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """A network namespace with one device in it."""

    namespace: str
    device: str
    address: str

    def cut(self) -> None:
        """Pull the cable out of this host: nothing comes or goes, and nobody is told."""
        self._set("down")

    def mend(self) -> None:
        """Put it back."""
        self._set("up")

    def _set(self, state: str) -> None:
        run_command(["ip", "-n", self.namespace, "link", "set", self.device, state]).check_returncode()


def two_hosts(number: int | None = None) -> tuple[Host, Host]:
    """Names that no other process of this machine uses. (A device's name has 15 characters at most.)"""
    number = os.getpid() if number is None else number
    return tuple(Host(f"tpcode-{number}-{i}", f"tp{number}x{i}", f"10.97.53.{i + 1}") for i in range(2))


def making(hosts: tuple[Host, Host], rate: str | None) -> list[list[str]]:
    """The commands that make two namespaces and the link between them, of that rate if one is given."""
    one, other = hosts
    commands = [["ip", "netns", "add", host.namespace] for host in hosts]
    commands.append(["ip", "link", "add", one.device, "type", "veth", "peer", "name", other.device])
    for host in hosts:
        inside = ["ip", "-n", host.namespace]
        commands += [
            ["ip", "link", "set", host.device, "netns", host.namespace],
            [*inside, "addr", "add", f"{host.address}/24", "dev", host.device],
            [*inside, "link", "set", "lo", "up"],
            [*inside, "link", "set", host.device, "up"],
        ]
        limit = ["tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", "tbf"]
        commands += [[*limit, "rate", rate, "burst", "256kb", "latency", "100ms"]] if rate else []
    return commands


def removing(hosts: tuple[Host, Host]) -> list[list[str]]:
    """The commands that remove them. With a namespace goes the device in it, and with a device its peer; a device that
    never came into its namespace is removed by name."""
    commands = [["ip", "link", "del", host.device] for host in hosts]
    return commands + [["ip", "netns", "del", host.namespace] for host in hosts]


@contextmanager
def linked_namespaces(rate: str | None, run: Callable = run_command) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them; removed at the end, whatever happens.

    Args:
        rate: of the link, in the words of `tc`: "1gbit"; None leaves it as it is.
        run: what runs a command.

    Raises:
        NoNamespaces: they cannot be made.
    """
    for tool in ("ip", "tc") if rate else ("ip",):
        if shutil.which(tool) is None:
            raise NoNamespaces(f"no network namespaces: there is no `{tool}` here (Debian: apt install iproute2)")
    hosts = two_hosts()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a kill, too, removes what was made
    try:
        for command in making(hosts, rate):
            done = run(command)
            if done.returncode:
                why = done.stderr.strip() or f"exit code {done.returncode}"
                hint = "" if os.geteuid() == 0 else "; it takes root"
                raise NoNamespaces(f"no network namespaces: `{' '.join(command)}` said: {why}{hint}")
        yield hosts
    finally:
        for command in removing(hosts):
            run(command)
        signal.signal(signal.SIGTERM, before)
