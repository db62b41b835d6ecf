"""What a GPU does, in minutes: `python -m chatd.bench gpu --minutes 8 --json PATH`.

script.py      which parts run, the table, the JSON
parts.py       a part, and running those whose time fits
timing.py      seconds of work on a device
checks.py      every kernel against its reference
rates.py       bandwidth of copies, operations of products
attention.py   decode and prefill; blocks before layers, and layers before blocks
models.py      models of random weights, and the roofline of their decode steps
steps.py       decode steps of a whole model
engine.py      the whole engine: the host's part of a step, cached prompts
peer.py        the same beside transformers
sampling.py    drawing tokens, beside a sort
"""

from chatd.bench.gpu.script import main as main
