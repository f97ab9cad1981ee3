"""Checks what servers hold after a `sharded` transfer by means that do not depend on our tables.

A receiver writes slices to the places given by a table and digests these places, so it cannot detect an error in the
table.  Two other checks can: the first slices sent to a server process are compared with the server's own loading of
whole tensors, and its checksums over all its parameters must change when the weights change.
"""

from __future__ import annotations

from megarl.weights.mapping.names import some_names
from megarl.weights.push.delivery import disagreements
from megarl.weights.push.servers import Server
from megarl.weights.push.targets import Lead


def look_at_slices(lead: Lead) -> None:
    """After slices were sent: servers whose checksums contradict them fall back to another transport.

    Servers whose slices were not yet compared with whole tensors, or have to be again, get these too;
    `compare_with_whole` then compares.
    """
    targets, (sent, lead.sent) = lead.targets, (lead.sent, {})
    with targets.clock("verify"):
        looked = targets.attempt(Server.look, sent)
    faults = disagreements({url: targets.left[url] for url in looked}, sent)
    for url, held in looked.items():
        if url in faults:
            targets.fall_back(url, faults[url])
        elif targets.left[url].fits_slices and not lead.checks:
            targets.left[url].remember(sent[url])
        else:
            lead.slices[url] = (sent[url], held)
            targets.send_on(url)


def compare_with_whole(lead: Lead) -> None:
    """After slices and then whole tensors were sent: check which servers held the same after both."""
    targets, (slices, lead.slices) = lead.targets, (lead.slices, {})
    for url in [url for url in slices if url in targets.done]:
        server, (text, by_slices) = targets.left[url], slices[url]
        differ = [
            name for a, b in zip(by_slices, server.held, strict=True) for name in a | b if a.get(name) != b.get(name)
        ]
        server.fits_slices = not differ
        if differ:
            how = f"{url} held other weights after slices than after whole tensors: {some_names(differ)}"
            targets.warn(url, "sharded", how)
        else:
            targets.done[url] = "sharded"
            server.remember(text)
            lead.compared.add(url)
