"""What a GPU does, in minutes: `python -m chatd.bench gpu --minutes 8 --json PATH`.

script.py      which parts run, the table, the JSON
parts.py       a part, and running those whose time fits
timing.py      seconds of work on a device
checks.py      every kernel against its reference
copies.py      bandwidth of copies; blocks before layers, and layers before blocks
attention.py   decode and prefill
sampling.py    drawing tokens, beside a sort
"""

from chatd.bench.gpu.script import main as main
