"""What a run comes to, before a GPU is taken: parameters, memory and time of every kind of rank.

    memory/      count.py has parameters by arithmetic on a config.json, meta.py by asking Megatron, whose modules
                 it builds without memory for their weights: the tests hold the two to the same numbers.  memory.py has
                 the rule for one role; gpu_budget.py puts roles, servers, pushes and saves together
    time/        flops.py and gpus.py (data sheets) give ceilings, constants.py what is reached of them: passes.py and
                 training.py for the trainer, serving.py and lengths.py for servers, transfers.py between
    a run        job.py has all numbers that these want, from_config.py takes them out of a Config, predict.py puts the
                 answers together, candidates.py and search.py look for better layouts
    command/     report.py is `trainer.check_only`; request.py, command.py and show.py are `megarl plan`, cluster.py
                 the GPUs that it is for

The room starts no process and reads no weights, and only memory/meta.py needs torch.
"""
