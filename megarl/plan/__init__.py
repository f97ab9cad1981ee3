"""The planner: predicts parameters, memory and time of every kind of rank without a GPU.

    a run        job.py has all input numbers, arch/gpus.py the data sheets; from_config.py reads them from a Config
    a model      weights/count.py sums parameters over the table of weights, and FLOPs over arch/layers.py, which
                 has the facts of a config.json; adapters.py has LoRA; tests compare with Megatron's modules
    memory       memory.py has the rule for one role; gpu_budget.py combines roles, servers, pushes and checkpoint
                 saves on a GPU, host.py what a machine holds
    time         data sheets give upper limits, constants.py the shares that are reached: training.py for the trainer,
                 serving.py and lengths.py for servers, transfers.py between them
    results      predict.py combines memory and time, search.py looks for better layouts, report.py prints what
                 `trainer.check_only` prints, predictions.py warns when a run starts; commands/plan is `megarl plan`

Commands call it; nothing below them does.  It starts no process, reads no weights and needs no torch.
"""
