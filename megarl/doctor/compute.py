"""What computes the parts of a model on this machine: Transformer Engine's kernels, Apex's, DeepEP's, or ours.

Megatron-Core and our layers are asked, not the list of packages: a package that was built for another torch is there
and cannot be imported.
"""

from __future__ import annotations

import warnings

from megarl.doctor.finding import FAIL, NOTE, OK, Finding

APEX = "gradients added inside the matrix product on a GPU"
_INSTALL_TE = "bash launch/gpu/install.sh transformer_engine"


def accelerator(device: str) -> Finding:
    """`device`: trainer.device."""
    wanted, otherwise = ("trainer.device=cuda needs one", FAIL) if device == "cuda" else ("optional", OK)
    try:
        import torch
    except ImportError as error:
        return Finding("CUDA", f"unknown: {error}", wanted, NOTE)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        mend = "bash launch/gpu/install.sh" if otherwise == FAIL else ""
        return Finding("CUDA", "none", wanted, otherwise, mend, value=0)
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = sorted({f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus})
    return Finding("CUDA", f"{count} x {' and '.join(kinds)}; CUDA {torch.version.cuda}", wanted, OK, value=count)


def parts() -> list[Finding]:
    """Who computes each part of a model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Megatron about what is missing: the rows say it
            import torch
            from megatron.core.optimizer import Adam

            from megarl.mcore.logprobs import fused, fused_torch
            from megarl.mcore.logprobs.main_grad import has_fused_accumulation
            from megarl.mcore.training.execution import has_deep_ep, has_transformer_engine
    except ImportError as error:
        return [Finding("model", f"unknown: {error}", "Megatron-Core and torch", FAIL)]
    gpu, te = torch.cuda.is_available(), has_transformer_engine()
    slower = NOTE if gpu and not te else OK
    mend, wanted = _INSTALL_TE if slower == NOTE else "", "on GPUs Transformer Engine's"
    attention = "Transformer Engine" if te else "torch's scaled_dot_product_attention over packed rows"
    layers = "Transformer Engine" if te else "torch's norms, Megatron's linear layers"
    gradients = "added inside the matrix product by " + ("Transformer Engine; " if te else "")
    if not te and not has_fused_accumulation():
        gradients = "a product and an addition; "
    kernels = "our torch operations" if fused.gpu_kernels is fused_torch else "our Triton kernels"
    head = "Apex" if has_fused_accumulation() else "two operations"
    return [
        Finding("attention", attention, wanted, slower, mend),
        Finding("norms, linear layers", layers, wanted, slower, mend),
        Finding("optimizer", f"{Adam.__module__.partition('.')[0]}'s {Adam.__name__}", "optional: a fused one", OK),
        Finding("weight gradients", f"{gradients}of the head: {head}", f"optional: Apex, {APEX}", OK),
        Finding("log-probs", kernels, "Triton on GPUs", OK),
        Finding("experts' exchange", "DeepEP" if has_deep_ep() else "all-to-all", "optional: deep_ep, bfloat16", OK),
    ]
