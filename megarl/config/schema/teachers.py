"""Keys of distillation: the teachers, and how the policy learns from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.schema.roles import Ref, StartModel


@dataclass
class TeacherModel(StartModel):
    path: str = ""  # Hugging Face folder or hub name of the teacher; its tokenizer must be the policy's


@dataclass
class TeacherServer:
    urls: list[str] = field(
        default_factory=list
    )  # of servers of this model, http://host:port; empty = the run starts one
    api_key_env: str | None = None  # the environment variable that holds the key of `urls`; null = they need none
    first_gpu: int | None = None  # of the server that the run starts; needed on a machine with GPUs
    num_gpus: int = 1  # of that server
    memory_fraction: float | None = None  # of its GPUs, for weights and KV cache; null = the engine decides
    concurrency: int = 64  # requests at a time, to all servers


@dataclass
class Teacher(Ref):
    model: TeacherModel = field(default_factory=TeacherModel)
    engine: str = (
        "megatron"  # megatron (on the run's ranks, as the keys of its layout say) | server (of rollout.engine)
    )
    server: TeacherServer = field(default_factory=TeacherServer)
    data_sources: list[str] = field(  # it teaches samples of prompts with these data_source's; empty = all that no
        default_factory=list  # other teacher teaches
    )
    coef: float = 1.0  # multiplies distill.coef for this teacher's samples


@dataclass
class Distill:
    form: str = "loss"  # loss (a divergence from the teacher) | reward (its log-probs, added to the advantages)
    divergence: str = "reverse_kl"  # of the policy from the teacher at each token, with form=loss
    beta: float = 0.5  # jsd: the teacher's share of the mixture; near 0 as the forward KL, near 1 as the reverse KL
    top_k: int | None = None  # over the teacher's k likeliest tokens and the sum of the others; null = the vocabulary
    coef: float = 1.0  # weight of the divergence in the loss, or of the reward in the advantages
    end_coef: float | None = None  # its value at the end of the decay; null = coef
    decay_style: str = "constant"  # constant | linear | cosine: how it goes from coef to end_coef
    decay_steps: int | None = None  # iterations until end_coef; null = the whole run
    route: str | None = (
        None  # path/file.py:function: prompt -> the name of its teacher, or None; instead of data_sources
    )
