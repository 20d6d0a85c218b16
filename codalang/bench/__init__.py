"""What `codalang bench` measures, and how: fused kernels beside the same work done in other ways.

| file                 | job                                                                                     |
|----------------------|-----------------------------------------------------------------------------------------|
| `timing.py`          | device time of interleaved calls with a cold L2; host time on its own                   |
| `workloads.py`       | patterns of a Transformer's layer x widths x token counts, as data; their operands      |
| `plain.py`           | the same work in plain torch, as people write it                                        |
| `implementations.py` | ways to do a workload: ours, cuBLAS alone, torch, torch.compile, other libraries        |
| `rivals.py`          | Liger, QuACK and CODA's public code, where they are installed                           |
| `measure.py`         | compile ahead, time, check, one workload after the other, within a budget of time       |
| `host.py`            | the host's time per call                                                                |
| `first_call.py`      | a fresh process's first calls                                                           |
| `report.py`          | results as data, as JSON and as tables                                                  |
| `candidates.py`      | the configurations that a search tries                                                  |
| `tune.py`            | candidates compiled and timed, the best remembered                                      |
| `plot.py`            | results as SVG: bars and a roofline                                                     |
"""
