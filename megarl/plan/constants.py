"""The time model's constants that are not in data sheets, and the links between GPUs at the rates that they reach.

The constants named in benchmarks/plan/fit.py are fitted on one half of the published rows (benchmarks/published.yaml)
and tested on the other half; the rest are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of the GPU's peak; seconds are fixed costs."""

    # matrix products and the operations between them
    matmul: float = 0.693  # share of peak FLOP/s: dense matrix products of training and log-probs
    experts: float = 0.51  # share of peak FLOP/s: grouped products of experts
    attention: float = 0.50  # share of peak FLOP/s: fused attention over packed sequences
    ring_turn: float = 0.05  # share of attention's time added by each further context-parallel rank: shorter kernels
    head: float = 0.60  # share of peak FLOP/s: vocabulary head with its softmax
    fp8: float = 1.63  # speed of matrix products in fp8 relative to bf16
    memory: float = 0.75  # share of memory bandwidth: norms, activations, optimizer
    touches: float = 2.0  # how often a forward pass moves a layer's kept activations; a backward pass twice as often
    layer_s: float = 150e-6  # minimum time of a layer's forward pass: kernel launches; a backward pass takes twice this
    expert_layer_s: float = 0.0015  # the same for a layer with experts: permutation, counts, exchanges
    expert_imbalance: float = 1.25  # tokens of the busiest expert rank over the mean

    # communication
    link: float = 0.70  # share of the links' bandwidth inside a machine
    nic: float = 0.75  # share of the adapters' bandwidth between machines
    all_to_all: float = 0.447  # factor on top of the two above for the all-to-all of experts
    tp_exposed: float = 0.80  # share of tensor-parallel communication that no computation hides
    grad_hidden: float = 0.80  # share of the last micro-batch's backward pass that can hide the gradient reduction
    replica_imbalance: float = 1.03  # time of the busiest replica over the mean

    # servers
    decode_memory: float = 0.598  # share of memory bandwidth: weights and cache read for each token
    decode_matmul: float = 0.45  # share of peak FLOP/s, if decoding of many sequences is compute-bound
    prefill_matmul: float = 0.50  # share of peak FLOP/s: prefill of prompts
    decode_step_s: float = 0.00498  # each step of a server: scheduler, sampling, replies
    decode_layer_s: float = 12e-6  # each layer of a step: kernels of a CUDA graph
    all_reduce_s: float = 12e-6  # an all-reduce of a step inside a machine
    all_reduce_nic_s: float = 4.16e-05  # an all-reduce over several machines
    tail: float = 2.33  # the longest completion over the mean, as far as the limit allows
    cache_waste: float = 0.90  # share of the KV cache that running requests fill

    # weights
    push_nic: float = 0.433  # share of the adapters' bandwidth, shard to shard
    gather: float = 0.3  # share of the links' or the adapters' bandwidth when ranks gather whole tensors
    broadcast: float = 0.606  # share of the adapters' bandwidth when every server gets the whole model
    push_s: float = 0.471  # each push: pause, plan, versions, checks
    push_tensor_s: float = 4.55e-05  # each tensor of the model: names, copies, load
    bucket_s: float = 5e-3  # each bucket of whole tensors: a barrier, a request to every server, digests

    # colocation, disks and the driver
    host: float = 0.60  # share of the bandwidth to host memory
    sleep_s: float = 1.0  # a server releases its memory
    wake_s: float = 1.5  # a server resumes its memory
    step_s: float = 2.0  # driver, rewards, advantages, logs, each step
    sequence_s: float = 0.00297  # the same for each sequence


CONSTANTS = Constants()


@dataclass(frozen=True)
class Links:
    """Communication between the GPUs of a group: reached bandwidths, B/s of a GPU in one direction."""

    link: float
    nic: float
    domain: int  # GPUs connected by the links

    def ring(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of a gather or a reduce-scatter of num_bytes over `size` GPUs, each `stride` from the next.

        Between machines, the members on one machine use the adapters of all of them.
        """
        if size == 1:
            return 0.0
        moved = num_bytes * (size - 1) / size
        if size * stride <= self.domain:
            return moved / self.link
        members = max(1, self.domain // stride)
        return moved / min(self.link, self.nic * members)

    def exchange(self, num_bytes: float, size: int, stride: int, copies: int, *, once: bool = False) -> float:
        """Seconds of an all-to-all in which each of `size` GPUs sends num_bytes to `copies` random ones of them.

        once: data for several GPUs of another machine is sent there once and copied inside it.
        """
        if size == 1:
            return 0.0
        inside = min(size, max(1, self.domain // stride))
        machines = size / inside
        near, far = copies * (inside - 1) / size, copies * (size - inside) / size
        if once:
            far = (machines - 1) * (1 - (1 - 1 / machines) ** copies)
        return num_bytes * max(near / self.link, far / self.nic)

    def hop(self, num_bytes: float, stride: int) -> float:
        """Seconds of a send from a GPU to the GPU `stride` after it."""
        return num_bytes / (self.link if stride < self.domain else self.nic)
