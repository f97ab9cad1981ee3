"""The numbers of the model of time that no data sheet has: shares of a ceiling that are reached, and fixed costs.

Those that benchmarks/plan_fit.py names are fitted on one half of published rows (benchmarks/published.yaml) and tested
on the other; the rest are what they should be by their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of the GPU's peak; seconds are fixed costs."""

    # matrix products and what lies between them
    matmul: float = 0.68  # share of peak FLOP/s: dense matrix products of training and log-probs
    experts: float = 0.51  # the same of grouped products of experts
    attention: float = 0.50  # the same of fused attention over packed sequences
    ring_turn: float = 0.05  # of attention's time, what each further context-parallel rank adds: shorter kernels
    head: float = 0.60  # the same of the vocabulary head with its softmax
    fp8: float = 1.6  # how much faster matrix products are in fp8 than in bf16
    memory: float = 0.75  # share of memory bandwidth: norms, activations, optimizer
    touches: float = 2.0  # times that a forward pass moves what a layer keeps of a token; a backward pass twice as many
    layer_s: float = 150e-6  # least time of a layer's forward pass: launches of kernels; of a backward pass twice it
    expert_layer_s: float = 0.0015  # the same of a layer with experts: permutation, counts, exchanges
    expert_imbalance: float = 1.25  # the busiest expert rank's tokens over the mean's

    # communication
    link: float = 0.70  # share of the links' bandwidth inside a machine
    nic: float = 0.75  # share of the adapters' bandwidth between machines
    all_to_all: float = 0.449  # share of either that an exchange of experts reaches, on top of the two above
    tp_exposed: float = 0.80  # share of tensor-parallel communication that no product hides
    grad_hidden: float = 0.80  # share of the last micro-batch's backward pass that may hide the gradients' reduction
    replica_imbalance: float = 1.03  # the busiest replica's time over the mean's

    # servers
    decode_memory: float = 0.616  # share of memory bandwidth: weights and cache read for each token
    decode_matmul: float = 0.45  # share of peak FLOP/s, where many sequences make decoding a matter of products
    prefill_matmul: float = 0.50  # share of peak FLOP/s of prompts
    decode_step_s: float = 0.00498  # each step of a server: scheduler, sampling, replies
    decode_layer_s: float = 12e-6  # each layer of a step: kernels of a CUDA graph
    all_reduce_s: float = 12e-6  # one all-reduce of a step inside a machine
    all_reduce_nic_s: float = 3.6e-05  # one over several machines
    tail: float = 2.57  # the longest completion over the mean one, as far as the limit allows
    cache_waste: float = 0.90  # share of the KV cache that running requests fill

    # weights
    push_nic: float = 0.433  # share of the adapters' bandwidth, shard to shard
    push_link: float = 0.20  # share of the links' bandwidth, shard to shard inside a machine
    gather: float = 0.611  # share of the links' or the adapters' bandwidth where ranks gather whole tensors
    broadcast: float = 0.743  # share of the adapters' bandwidth where every server gets the whole model
    push_s: float = 0.485  # each push: pause, plan, versions, checks
    push_tensor_s: float = 4.14e-05  # each tensor of the model: names, copies, load

    # turns and the driver
    host: float = 0.60  # share of the bandwidth to host memory
    sleep_s: float = 1.0  # a server gives its memory back
    wake_s: float = 1.5  # and takes it again
    step_s: float = 2.0  # driver, rewards, advantages, logs, each step
    sequence_s: float = 0.00297  # and of each sequence


CONSTANTS = Constants()
