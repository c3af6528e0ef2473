#!/usr/bin/env python3
"""Draws data-path.svg, the way of a host's I/O through Rimrock, and data-path.png when rsvg-convert is there."""

import shutil
import subprocess
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1200, 800

INK, QUIET, PAPER = "#1d2733", "#5b6875", "#ffffff"
HOST = ("#eef2f6", "#8796a5")
PROCESS = ("#fbfaf7", "#b9ac8f")
REACTOR = ("#f3efe4", "#b9ac8f")
TARGET = ("#dcebf7", "#4f8ab8")
POOL = ("#dff0e1", "#4d9459")
DEVICE = ("#f6e3d3", "#c07a3e")
CONTROL = ("#ece4f5", "#8666ad")
DATA, MESSAGE = "#1f5f94", "#8666ad"

parts = []


def box(x, y, width, height, colours, title, *lines, radius=7):
    """A box with a bold title and quiet lines below it, all centred."""
    fill, edge = colours
    parts.append(
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{edge}"'
        ' stroke-width="1.4"/>'
    )
    step = 17
    first = y + height / 2 - step * len(lines) / 2 + 5
    text(x + width / 2, first, title, weight="bold")
    for i, line in enumerate(lines):
        text(x + width / 2, first + step * (i + 1), line, size=12.5, fill=QUIET)


def frame(x, y, width, height, colours, title):
    """A box around others, its title in the upper left corner."""
    fill, edge = colours
    parts.append(
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="{fill}" stroke="{edge}"'
        ' stroke-width="1.4"/>'
    )
    text(x + 14, y + 24, title, weight="bold", anchor="start")


def text(x, y, words, size=14, fill=INK, weight="normal", anchor="middle"):
    parts.append(
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(points, colour=DATA, both=True, dashed=False):
    """A line through points, with a head at its end, or at both."""
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    name = "data" if colour == DATA else "message"
    start = f' marker-start="url(#{name})"' if both else ""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    parts.append(
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}{start} marker-end="url(#{name})"/>'
    )


def reactor(x, core):
    frame(x, 150, 262, 460, REACTOR, f"reactor on core {core}")
    middle = x + 131
    box(x + 16, 186, 230, 58, TARGET, "session · connection", "PDUs in and out, all checked")
    box(x + 16, 272, 230, 58, TARGET, "queue · io", "commands → jobs, one buffer each")
    arrow([(middle, 246), (middle, 270)])
    arrow([(middle, 332), (middle, 354)])
    arrow([(middle, 424), (middle, 446)])
    box(x + 16, 448, 230, 88, POOL, "shards of this core", "page tree, space, journal, commit",
        "every block read fits its CRC", "no lock, no other core")
    box(x + 16, 564, 230, 34, DEVICE, "io_uring of this core")
    arrow([(middle, 538), (middle, 562)])


def host():
    frame(24, 150, 232, 320, HOST, "Linux host, unmodified")
    box(40, 186, 200, 58, (PAPER, HOST[1]), "training, serving", "checkpoints, model files")
    box(40, 272, 200, 58, (PAPER, HOST[1]), "XFS, ext4, raw", "/dev/nvme1n1")
    box(40, 358, 200, 92, (PAPER, HOST[1]), "nvme-tcp", "the kernel's initiator:", "one admin queue,", "one I/O queue per core")
    arrow([(140, 246), (140, 270)])
    arrow([(140, 332), (140, 356)])
    arrow([(242, 390), (290, 390), (290, 215), (352, 215)])
    arrow([(242, 420), (298, 420), (298, 138), (838, 138), (838, 184)])
    text(140, 496, "TCP, port 4420", size=13, fill=DATA, weight="bold")
    text(140, 514, "one connection per queue,", size=12.5, fill=DATA)
    text(140, 530, "dealt over the cores", size=12.5, fill=DATA)


def device(x, index):
    box(x, 660, 262, 36, DEVICE, f"device {index}", radius=7)
    text(x + 131, 714, "a file or a drive, O_DIRECT; or memory", size=12.5, fill=QUIET)
    shares = [("label", 38), ("roots", 40), ("journals", 58), ("catalog", 54), ("regions …", 72)]
    at = x
    for name, width in shares:
        parts.append(
            f'<rect x="{at}" y="724" width="{width}" height="26" fill="{PAPER}" stroke="{DEVICE[1]}" stroke-width="1.1"/>'
        )
        text(at + width / 2, 741, name, size=11.5, fill=QUIET)
        at += width


def control():
    box(924, 24, 236, 62, CONTROL, "rimrock …", "the command line, SPDK's clients", "(CSI drivers, gateways)")
    frame(912, 150, 260, 300, REACTOR, "control thread")
    arrow([(1086, 88), (1086, 184)], colour=MESSAGE)
    text(1076, 118, "Unix socket, JSON-RPC", size=12.5, fill=MESSAGE, anchor="end")
    box(928, 186, 228, 58, CONTROL, "methods", "one table declares them all")
    box(928, 272, 228, 58, CONTROL, "exports, devices, pools", "what is where, under which name")
    box(928, 366, 228, 70, CONTROL, "never on the I/O path", "snapshot, rollback, export:", "messages to the reactors")
    arrow([(1042, 246), (1042, 270)], colour=MESSAGE)
    arrow([(1042, 332), (1042, 364)], colour=MESSAGE)
    arrow([(926, 420), (900, 420), (900, 490), (864, 490)], colour=MESSAGE, dashed=True)
    text(912, 484, "fence, seal, catalog record:", size=12.5, fill=MESSAGE, anchor="start")
    text(912, 501, "one instant over all shards", size=12.5, fill=MESSAGE, anchor="start")


def draw():
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>')
    text(24, 44, "The way of a read or a write", size=22, weight="bold", anchor="start")
    text(24, 68, "from a host's file system to a device, and where it is steered from", size=14, fill=QUIET, anchor="start")
    frame(318, 96, 870, 530, PROCESS, "rimrock: one process, one thread per core")
    reactor(338, 1)
    reactor(618, 2)
    # What all reactors share, across both.
    box(354, 356, 510, 66, POOL, "namespace → volume", "read-mostly handles, shared by all cores;",
        "a volume's chunks of 1 MiB are dealt over the shards")
    arrow([(586, 490), (632, 490)], colour=MESSAGE, dashed=True)
    text(609, 552, "messages", size=12, fill=MESSAGE)
    host()
    for ring in (469, 749):
        for place, shift in ((469, ring - 609), (749, ring - 609)):
            arrow([(ring + (place - 609) / 10, 600), (place + shift / 10, 658)])
    device(338, 0)
    device(618, 1)
    control()
    text(600, 780, "metadata in two copies, on two devices where there are two; nothing live is overwritten in place",
         size=13, fill=QUIET)
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5"'
        f' orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        for name, colour in (("data", DATA), ("message", MESSAGE))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="DejaVu Sans, Verdana, sans-serif">\n'
        "<title>The data path of Rimrock</title>\n"
        f"<defs>{heads}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


svg = HERE / "data-path.svg"
svg.write_text(draw())
if shutil.which("rsvg-convert"):
    subprocess.run(["rsvg-convert", "--zoom", "1.5", "-o", HERE / "data-path.png", svg], check=True)
