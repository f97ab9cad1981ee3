"""What a run comes to, before a GPU is taken: parameters, memory and time of every kind of rank.

    parameters   count.py, arithmetic on the numbers of a config.json; meta.py asks Megatron itself, whose modules it
                 builds without memory for their weights: the tests hold the two to the same numbers
    memory       memory.py has the rule for one role; rooms.py puts roles, servers, pushes and saves together
    time         flops.py and gpus.py (data sheets) give ceilings, constants.py what is reached of them: passes.py and
                 training.py for the trainer, serving.py and lengths.py for servers, pushing.py and turns.py between
    a run        job.py has all numbers that these want, from_config.py takes them out of a Config, predict.py puts the
                 answers together, candidates.py and search.py look for better layouts
    to a person  report.py is `trainer.check_only`; request.py, cluster.py, command.py and show.py are `megarl plan`

The room starts no process and reads no weights, and only meta.py needs torch.
"""
