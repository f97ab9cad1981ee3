"""The planner: predicts parameters, memory and time of every kind of rank without a GPU.

    memory/      count.py computes parameters from a config.json; tests compare it with Megatron's modules.  memory.py
                 has the rule for one role; gpu_budget.py combines roles, servers, pushes and checkpoint saves
    time/        flops.py and gpus.py (data sheets) give upper limits, constants.py the shares that are reached:
                 passes.py and training.py for the trainer, serving.py and lengths.py for servers, transfers.py between
    a run        job.py has all input numbers, from_config.py reads them from a Config, predict.py combines the
                 results, server_args.py reads the servers' own arguments, candidates.py and search.py search for
                 better layouts
    command/     report.py is `trainer.check_only`; request.py, command.py and show.py are `megarl plan`; cluster.py
                 selects its GPUs

The package starts no process, reads no weights and needs no torch.
"""
