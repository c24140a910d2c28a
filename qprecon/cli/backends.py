"""`qprecon backends`."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    description = "The solvers, whether each can run here, what it can do, and the pip extra that brings it."
    return subparsers.add_parser("backends", help="list the solvers", description=description)


def run(arguments: argparse.Namespace) -> int:
    """Print one row a backend."""
    from qprecon import available_backends

    rows = [("backend", "installed", "bounds", "devices", "dtypes", "pip extra", "what it is")]
    for name, facts in available_backends().items():
        capabilities = facts["capabilities"]
        installed = "yes" if facts["installed"] else f"no ({', '.join(facts['missing']) or 'see right'})"
        bounds = "yes" if capabilities["bounds"] else "no"
        devices, dtypes = ",".join(capabilities["devices"]), ",".join(capabilities["dtypes"])
        rows.append((name, installed, bounds, devices, dtypes, facts["extra"] or "-", facts["summary"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
